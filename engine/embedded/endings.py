"""How requests end: last output, blocks back to the pool or pinned, and `released` exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from connector.params import ticket_from_params
from engine.base import EngineOutput
from engine.embedded.block_pool import BlockPool
from engine.embedded.connector_port import SchedulerPort
from engine.embedded.request import Event, Request, State
from pdq.wire.types import TokenLogprob, pack_ids

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """`finish`: prefilled, stop, length, aborted or error."""

    finish: str
    stop_token_id: int | None = None
    error: str | None = None
    has_output: bool = True


def ending_of(request: Request, token_id: int, eos_token_ids: frozenset[int]) -> Ending | None:
    """Does the token just appended end it?"""
    sampling, num_generated = request.sequence.sampling, request.num_generated
    if num_generated >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return Ending(finish="stop", stop_token_id=token_id)
    return Ending(finish="length") if num_generated >= request.max_tokens else None


class Endings:
    """Also collects the step's news: `outputs` and `released`."""

    def __init__(self, pool: BlockPool, half: SchedulerPort, requests: dict[str, Request], *, block_size: int) -> None:
        self.outputs: list[EngineOutput] = []
        self.released: list[str] = []
        self.num_pinned = 0
        self._pool = pool
        self._half = half
        self._requests = requests
        self._block_size = block_size

    def take_news(self) -> tuple[tuple[EngineOutput, ...], tuple[str, ...]]:
        news = tuple(self.outputs), tuple(self.released)
        self.outputs.clear()
        self.released.clear()
        return news

    def report(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> None:
        """A token of a request that goes on."""
        self.outputs.append(
            EngineOutput(
                engine_request_id=request.engine_request_id,
                token_ids=pack_ids((token_id,)),
                logprobs=None if logprob is None else (logprob,),
                prompt_logprobs=_take_prompt_logprobs(request),
            )
        )

    def refuse(self, engine_request_id: str, error: str) -> None:
        """It never became a request: nothing to free."""
        self.outputs.append(EngineOutput(engine_request_id=engine_request_id, error=error))
        self.released.append(engine_request_id)

    def end(
        self,
        request: Request,
        ending: Ending,
        token_id: int | None = None,
        logprob: TokenLogprob | None = None,
    ) -> None:
        """Last output, then free or pin. Hook: request_finished."""
        sequence, finish = request.sequence, ending.finish
        num_blocks = -(-sequence.num_computed // self._block_size)
        is_delayed, params = self._half.request_finished(
            request.engine_request_id, sequence.block_ids[:num_blocks], finish
        )
        if ending.has_output:
            is_prefilled = finish == "prefilled"
            self.outputs.append(
                EngineOutput(
                    engine_request_id=request.engine_request_id,
                    token_ids=b"" if token_id is None else pack_ids((token_id,)),
                    logprobs=None if logprob is None else (logprob,),
                    prompt_logprobs=_take_prompt_logprobs(request),
                    finish=None if ending.error else finish,
                    stop_token_id=ending.stop_token_id,
                    error=ending.error,
                    ticket=ticket_from_params(params) if is_prefilled and params else None,
                    cached_tokens=request.cached_tokens,
                    transfer=request.transfer,
                )
            )
        if is_delayed:
            request.on(Event.ENDED_PINNED)
            self.num_pinned += 1
        else:
            self._free(request, Event.ENDED)

    def drain(self, request: Request) -> None:
        """Aborted while remote KV comes in: blocks stay until nothing writes them. Hook: request_finished."""
        self._half.request_finished(request.engine_request_id, request.sequence.block_ids, "aborted")
        request.on(Event.ABORTED_LOADING)

    def drained(self, engine_request_id: str) -> None:
        """`finished_recving` of a request that nobody waits for any more."""
        request = self._requests.get(engine_request_id)
        if request is None or request.state is not State.DRAINING:
            _log.warning("unexpected_finished_recving", engine_request_id=engine_request_id)
            return
        self._free(request, Event.DRAINED)

    def sent(self, engine_request_id: str) -> None:
        """`finished_sending`: no reader needs the blocks any more."""
        request = self._requests.get(engine_request_id)
        if request is None or request.state is not State.FINISHED_PINNED:
            _log.warning("unexpected_finished_sending", engine_request_id=engine_request_id)
            return
        self.num_pinned -= 1
        self._free(request, Event.SENT)

    def _free(self, request: Request, event: Event) -> None:
        request.on(event)
        self._pool.free(request.sequence.block_ids)
        request.sequence.block_ids = []
        del self._requests[request.engine_request_id]
        self.released.append(request.engine_request_id)


def _take_prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...] | None:
    """Once, complete, with the first output of a request that asked for them."""
    if request.prompt_logprobs is None:
        return None
    positions, request.prompt_logprobs = tuple(request.prompt_logprobs), None
    return positions
