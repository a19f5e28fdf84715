"""Hop 8: each engine step's tokens, as one frame per gateway."""

from __future__ import annotations

from broker.links import DeltaSender
from broker.messages import DecodeStats, Delta
from decode_worker.metrics import DecodeMetrics
from decode_worker.open_requests import OpenRequests
from decode_worker.requests import DecodeRequest, State
from engine.base import EngineOutput, StepOutputs
from pdq.wire.types import num_ids


class TokenStream:
    def __init__(self, *, requests: OpenRequests, deltas: DeltaSender, metrics: DecodeMetrics) -> None:
        self._requests = requests
        self._table = requests.table
        self._deltas = deltas
        self._metrics = metrics
        self._step = 0

    def on_step(self, step: StepOutputs) -> None:
        """Tokens of requests without Go are held back in the table."""
        self._step = self._deltas.step = step.stats.step
        frames: dict[str, list[Delta]] = {}
        for output in step.outputs:
            request = self._table.by_engine_id(output.engine_request_id)
            if request is None:
                continue
            if output.error is not None:
                self._requests.fail(request, output.error)
                continue
            delta = _delta(request, output)
            if output.transfer is not None:
                self._metrics.on_transfer(output.transfer)
            if request.state is State.ADMITTING:
                request.held_back.append(delta)
                continue
            frames.setdefault(request.offer.gateway, []).append(delta)
            if delta.finish is not None:
                self._requests.finish(request)
        for gateway, deltas in frames.items():
            self._push(gateway, deltas)

    def on_go(self, request: DecodeRequest, held_back: list[Delta]) -> None:
        """The request was admitted: what came before Go leaves first. From now on the gateway gets signs of life."""
        if not held_back:
            self._deltas.open(request.offer.gateway)
            return
        self._push(request.offer.gateway, held_back)
        if held_back[-1].finish is not None:
            self._requests.finish(request)

    def _push(self, gateway: str, deltas: list[Delta]) -> None:
        self._metrics.on_frame(sum(num_ids(delta.token_ids) for delta in deltas))
        self._deltas.push(gateway, self._step, tuple(deltas))


def _delta(request: DecodeRequest, output: EngineOutput) -> Delta:
    stats = None
    if output.finish is not None:
        prefilled = request.prefilled
        stats = DecodeStats(
            cached_tokens=output.cached_tokens,
            transfer=output.transfer,
            prefill_cached_tokens=prefilled.cached_tokens if prefilled else None,
            prefill_s=prefilled.prefill_s if prefilled else None,
        )
    delta = Delta(
        request_id=request.offer.request_id,
        pair=request.offer.pair,
        seq=request.next_seq,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish=output.finish,
        stop_token_id=output.stop_token_id,
        stats=stats,
    )
    request.next_seq += num_ids(output.token_ids)
    return delta
