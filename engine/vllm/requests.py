"""The requests that a vLLM engine has from us, and what its steps say of them. Pure.

OPEN --finish | error--> ENDED --released--> (forgotten)
OPEN --abort--> ABORTED --released--> (forgotten)

`released` comes from the connector for requests with KV parameters. For others it comes with their end, since vLLM
frees their blocks in the step that ends them; with their abort it comes at once, before vLLM has heard of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import structlog

from connector.params import ParamsError, ticket_from_params
from engine.base import EngineOutput, EngineRequest, LoadKv, PrefillOnly, ReceiveKv
from engine.vllm.logprobs import token_logprobs
from engine.vllm.sampling import is_prefill
from pdq.wire.types import KvTicket, TokenLogprob, TransferStats, num_ids, pack_ids

_log = structlog.get_logger(__name__)
_FINISHED: Final = {"stop": "stop", "length": "length", "repetition": "stop"}
_PREEMPTED: Final = 3
"""vLLM's EngineCoreEventType.PREEMPTED."""


class State(Enum):
    OPEN = auto()
    ENDED = auto()
    ABORTED = auto()


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    request: EngineRequest
    state: State = State.OPEN
    cached_tokens: int = 0
    transfer: TransferStats | None = None
    failure: str | None = None
    """Why its KV didn't come, when the connector said so."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """None: not asked for, or given already."""
    is_released: bool = False
    """The connector has said so before vLLM's output said that it ended."""

    @property
    def is_prefill(self) -> bool:
        return is_prefill(self.request.kv)

    @property
    def is_pinned(self) -> bool:
        """A finished prefill whose blocks somebody may still need."""
        return self.is_prefill and self.state is State.ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What happened since it was last asked for."""

    outputs: tuple[EngineOutput, ...]
    released: tuple[str, ...]


class OpenRequests:
    def __init__(self) -> None:
        self.num_preemptions = 0
        self._requests: dict[str, OpenRequest] = {}
        self._outputs: list[EngineOutput] = []
        self._released: list[str] = []
        self._unwanted: list[str] = []

    def counts(self) -> tuple[int, int]:
        """(open, pinned) requests."""
        num_open = sum(request.state is State.OPEN for request in self._requests.values())
        return num_open, sum(request.is_pinned for request in self._requests.values())

    @property
    def has_news(self) -> bool:
        return bool(self._outputs or self._released)

    def take_news(self) -> News:
        news = News(outputs=tuple(self._outputs), released=tuple(self._released))
        self._outputs.clear()
        self._released.clear()
        return news

    # What comes from the worker.

    def add(self, request: EngineRequest) -> bool:
        """False: this id is here already, maybe aborted and still draining; nothing changes."""
        if request.engine_request_id in self._requests:
            _log.error("duplicate_request", engine_request_id=request.engine_request_id)
            return False
        computes_prompt = not isinstance(request.kv, LoadKv | ReceiveKv)
        self._requests[request.engine_request_id] = OpenRequest(
            request=request,
            # nothing precedes the first token
            prompt_logprobs=[None] if computes_prompt and request.sampling.prompt_logprobs is not None else None,
        )
        return True

    def refuse(self, engine_request_id: str, error: str) -> None:
        """vLLM never took it: nothing to free. `error` is `code: detail`."""
        self._requests.pop(engine_request_id, None)
        self._outputs.append(EngineOutput(engine_request_id=engine_request_id, error=error))
        self._released.append(engine_request_id)

    def abort(self, engine_request_id: str) -> State | None:
        """The state that it was in; None: unknown. No output follows. OPEN: vLLM must be told."""
        request = self._requests.get(engine_request_id)
        if request is None:
            return None
        former = request.state
        if former is State.OPEN:
            request.state = State.ABORTED
            self._release_without_connector(request)
        return former

    def finished_prefill(self, engine_request_id: str) -> EngineRequest | None:
        """None: it is none, has not finished in vLLM, or its blocks are free already."""
        request = self._requests.get(engine_request_id)
        return request.request if request is not None and request.is_pinned else None

    def take_unwanted(self) -> list[str]:
        """Prefills that had finished in vLLM before it heard of their abort: to be released."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    # What comes from vLLM, in the order of one step.

    def on_step(self, outputs: Iterable[Any], connector_news: Mapping[str, Any] | None) -> None:
        """`outputs`: vLLM's EngineCoreOutputs.outputs; `connector_news`: our connector's statistics of this step."""
        news = connector_news or {}
        for engine_request_id, reason in news.get("failed", {}).items():
            if (failed := self._requests.get(engine_request_id)) is not None:
                failed.failure = reason
        for engine_request_id, stats in news.get("transfers", {}).items():
            if (loaded := self._requests.get(engine_request_id)) is not None:
                loaded.transfer = TransferStats(**stats)
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            if request.state is State.OPEN:
                self._on_output(request, output)
            elif request.state is State.ABORTED and request.is_prefill and str(output.finish_reason) in _FINISHED:
                request.state = State.ENDED
                self._unwanted.append(output.request_id)
        for engine_request_id in news.get("released", ()):
            self._on_released(engine_request_id)

    def _on_output(self, request: OpenRequest, output: Any) -> None:
        if output.prefill_stats is not None:
            request.cached_tokens = output.prefill_stats.num_local_cached_tokens
        for event in output.events or ():
            self.num_preemptions += event.type == _PREEMPTED
        if output.new_prompt_logprobs_tensors is not None and request.prompt_logprobs is not None:
            num_alternatives = request.request.sampling.prompt_logprobs or 0
            request.prompt_logprobs.extend(token_logprobs(output.new_prompt_logprobs_tensors, num_alternatives))
        finish = None if output.finish_reason is None else str(output.finish_reason)
        if finish is not None and finish not in _FINISHED:
            reason = f"kv_transfer_failed: {request.failure}" if request.failure else f"engine_error: {_why(finish)}"
            self._end(request, EngineOutput(engine_request_id=output.request_id, error=reason))
        elif request.is_prefill:
            if finish is not None:
                self._end(request, _prefilled(request, output.kv_transfer_params))
        elif output.new_token_ids or finish is not None:
            generated = _generated(request, output, _FINISHED[finish] if finish else None)
            if finish is None:
                self._outputs.append(generated)
            else:
                self._end(request, generated)

    def _end(self, request: OpenRequest, output: EngineOutput) -> None:
        request.state = State.ENDED
        self._outputs.append(output)
        if request.is_released:
            self._on_released(request.request.engine_request_id)
        self._release_without_connector(request)

    def _release_without_connector(self, request: OpenRequest) -> None:
        if request.request.kv is None:
            self._on_released(request.request.engine_request_id)

    def _on_released(self, engine_request_id: str) -> None:
        request = self._requests.pop(engine_request_id, None)
        if request is None:
            return
        if request.state is State.OPEN:
            request.is_released = True
            self._requests[engine_request_id] = request
            return
        self._released.append(engine_request_id)


def _why(finish: str) -> str:
    return "vLLM aborted the request" if finish == "abort" else "vLLM ended the request with an error"


def _prefilled(request: OpenRequest, kv_transfer_params: Mapping[str, Any] | None) -> EngineOutput:
    engine_request_id = request.request.engine_request_id
    ticket: KvTicket | None = None
    if isinstance(request.request.kv, PrefillOnly):
        try:
            ticket = ticket_from_params(kv_transfer_params or {})
        except ParamsError as error:
            reason = request.failure or f"the connector gave no KV ticket: {error}"
            return EngineOutput(engine_request_id=engine_request_id, error=f"engine_error: {reason}")
    return EngineOutput(
        engine_request_id=engine_request_id,
        finish="prefilled",
        ticket=ticket,
        cached_tokens=request.cached_tokens,
        prompt_logprobs=_taken_prompt_logprobs(request),
    )


def _generated(request: OpenRequest, output: Any, finish: str | None) -> EngineOutput:
    token_ids = output.new_token_ids
    num_alternatives = request.request.sampling.logprobs
    logprobs = None
    if num_alternatives is not None and output.new_logprobs is not None:
        logprobs = token_logprobs(output.new_logprobs, num_alternatives)
    return EngineOutput(
        engine_request_id=output.request_id,
        token_ids=pack_ids(token_ids),
        logprobs=logprobs,
        prompt_logprobs=_taken_prompt_logprobs(request),
        finish=finish,
        stop_token_id=token_ids[-1] if finish == "stop" and token_ids else None,
        cached_tokens=request.cached_tokens if finish else 0,
        transfer=request.transfer if finish else None,
    )


def _taken_prompt_logprobs(request: OpenRequest) -> tuple[TokenLogprob | None, ...] | None:
    """Once. Of the prompt's own positions: what was generated before a move to here is no part of it."""
    if request.prompt_logprobs is None:
        return None
    positions, request.prompt_logprobs = request.prompt_logprobs, None
    return tuple(positions[: num_ids(request.request.prompt_ids)])
