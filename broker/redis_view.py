"""What an operator's tools read of the queue: served models, and the requests in a prefill stream. Writes nothing.

Keys read: `pdq:models`, `pdq:{m}:prefill`, `pdq:{m}:req:<id>:<gen>` (see keys.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.keys import MODELS, Keys
from broker.redis_calls import RedisCalls
from broker.redis_replies import fields, text


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One queued or running prefill. A decoding request is no longer in the queue; its worker counts it as running."""

    request_id: str
    gen: int
    attempt: int
    state: str
    worker: str
    """Empty while nobody has it."""
    num_tokens: int
    age_s: float
    """Since it was enqueued."""


async def served_models(calls: RedisCalls) -> tuple[str, ...]:
    """Names in order of the alphabet. Raises QueueUnavailable."""
    return tuple(sorted(text(name) for name in await calls.call("SMEMBERS", MODELS)))


async def queued_requests(calls: RedisCalls, model: str, limit: int) -> tuple[RequestView, ...]:
    """The oldest `limit` entries of the stream. Raises QueueUnavailable."""
    keys = Keys(model)
    seconds, micros = await calls.call("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    rows: list[RequestView] = []
    for _, raw in await calls.call("XRANGE", keys.stream, "-", "+", "COUNT", limit):
        entry = fields(raw)
        request_id, gen = entry["id"], int(entry["gen"])
        request = fields(await calls.call("HGETALL", keys.req(request_id, gen)))
        rows.append(
            RequestView(
                request_id=request_id,
                gen=gen,
                attempt=int(request.get("attempt", "0")),
                state=request.get("state", "lost"),
                worker=request.get("worker", ""),
                num_tokens=int(entry.get("tokens", "0")),
                age_s=max(0, now_ms - int(request.get("enqueued", now_ms))) / 1000,
            )
        )
    return tuple(rows)
