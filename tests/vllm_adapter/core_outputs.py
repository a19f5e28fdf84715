"""What vLLM's engine core says, as plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.base import EngineRequest, LoadKv, PrefillOnly, PushKv, ReceiveKv
from pdq.wire.types import KvSource, KvTicket, Pair, SamplingParams, pack_ids

PAIR = Pair(gen=1, attempt=2)
TICKET = KvTicket(
    transfer_id="r1",
    pair=PAIR,
    engine_id="p1",
    epoch="e1",
    host="127.0.0.1",
    port=20001,
    tp_size=1,
    block_size=4,
    num_tokens=6,
    block_ids=pack_ids((7, 8)),
)
SOURCE = KvSource(engine_id="p1", epoch="e1", host="127.0.0.1", port=20001, tp_size=1, block_size=4)


class Rows:
    """An array that only says its rows."""

    def __init__(self, *rows: list[Any]) -> None:
        self._rows = list(rows)

    def tolist(self) -> list[Any]:
        return self._rows


def request(
    kv: PrefillOnly | LoadKv | PushKv | ReceiveKv | None = None,
    *,
    name: str = "r1",
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6),
    generated: tuple[int, ...] = (),
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        engine_request_id=f"{name}:1:2",
        request_id=name,
        pair=PAIR,
        prompt_ids=pack_ids(prompt),
        generated_ids=pack_ids(generated),
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        kv=kv,
    )


def output(*token_ids: int, name: str = "r1", finish: str | None = None, **more: Any) -> SimpleNamespace:
    """One request's part of a step."""
    fields = {
        "request_id": f"{name}:1:2",
        "new_token_ids": list(token_ids),
        "new_logprobs": None,
        "new_prompt_logprobs_tensors": None,
        "finish_reason": finish,
        "stop_reason": None,
        "events": None,
        "kv_transfer_params": None,
        "prefill_stats": None,
    }
    return SimpleNamespace(**(fields | more))


def step(*outputs: SimpleNamespace, running: int = 0, usage: float = 0.0, news: Any = None) -> SimpleNamespace:
    """One message of the engine core."""
    stats = SimpleNamespace(
        num_running_reqs=running,
        kv_cache_usage=usage,
        kv_connector_stats=news,
        prefix_cache_stats=SimpleNamespace(requests=0),
    )
    return SimpleNamespace(outputs=list(outputs), scheduler_stats=stats)
