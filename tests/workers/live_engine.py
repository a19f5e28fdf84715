"""An engine in the test's hands: it prefills at once, beats when told to, and hangs or dies when the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.base import (
    EngineError,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    LoadKv,
    PrefillOnly,
    PushKv,
    ReceiveKv,
    StepOutputs,
)
from pdq.wire.types import Capability, KvSource, KvTicket, pack_ids

SOURCE = KvSource(engine_id="e", epoch="x", host="127.0.0.1", port=1, tp_size=1, block_size=16)
INFO = EngineInfo(
    engine_id="e",
    epoch="x",
    block_size=16,
    total_blocks=100,
    max_model_len=1600,
    kv_source=SOURCE,
    fingerprint="f=1",
    capabilities=(Capability.LOGPROBS, Capability.PROMPT_LOGPROBS),
)


class LiveEngine:
    """Ids that it knows are released once: after `release`, `abort`, an error or the last token."""

    def __init__(self, *, prefills: bool = True, error: str | None = None) -> None:
        """`prefills` False: it takes prefills and never ends them. `error`: how it ends each of them."""
        self._prefills = prefills
        self._error = error
        self._steps: asyncio.Queue[StepOutputs | EngineError] = asyncio.Queue()
        self._known: set[str] = set()
        self._step = 0
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.is_hung = False

    async def start(self) -> EngineInfo:
        return INFO

    async def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)
        self._known.add(request.engine_request_id)
        if self._error is not None:
            self.say(EngineOutput(engine_request_id=request.engine_request_id, error=self._error))
            self.free(request.engine_request_id)
        elif self._prefills and isinstance(request.kv, PrefillOnly | PushKv):
            self.say(
                EngineOutput(engine_request_id=request.engine_request_id, finish="prefilled", ticket=_ticket(request))
            )
            if isinstance(request.kv, PushKv):
                self.free(request.engine_request_id)

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        while True:
            step = await self._steps.get()
            if isinstance(step, EngineError):
                raise step
            yield step

    async def abort(self, engine_request_id: str) -> None:
        self.aborted.append(engine_request_id)
        self.free(engine_request_id)

    async def release(self, engine_request_id: str) -> None:
        self.released.append(engine_request_id)
        self.free(engine_request_id)

    async def stop(self) -> None:
        pass

    def say(self, *outputs: EngineOutput, released: tuple[str, ...] = (), running: int = 1) -> None:
        """One step, unless it hangs."""
        if self.is_hung:
            return
        self._step += 1
        stats = EngineStats(step=self._step, total_blocks=100, free_blocks=50, running=running, waiting=0, pinned=0)
        self._steps.put_nowait(StepOutputs(outputs=outputs, released=released, stats=stats))

    def free(self, engine_request_id: str) -> None:
        if engine_request_id in self._known and not self.is_hung:
            self._known.discard(engine_request_id)
            self.say(released=(engine_request_id,))

    def token(self, request: EngineRequest, token_id: int, *, finish: str | None = None) -> None:
        output = EngineOutput(
            engine_request_id=request.engine_request_id, token_ids=pack_ids([token_id]), finish=finish
        )
        self.say(output)
        if finish is not None:
            self.free(request.engine_request_id)

    def die(self, reason: str) -> None:
        self._steps.put_nowait(EngineError(reason))


def is_decode(request: EngineRequest) -> bool:
    return request.kv is None or isinstance(request.kv, LoadKv | ReceiveKv)


def _ticket(request: EngineRequest) -> KvTicket | None:
    if not isinstance(request.kv, PrefillOnly):
        return None
    return KvTicket(
        transfer_id=request.request_id,
        pair=request.pair,
        engine_id="e",
        epoch="x",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        block_size=16,
        num_tokens=len(request.prompt_ids) // 4,
        block_ids=pack_ids([0]),
    )
