"""How one push goes on, from RECV_READY to its end: whom it asks, what it writes, what it says. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from connector.asks import Asks
from connector.greetings import Greetings, Peer
from connector.layout import KvRegion, LayoutError, plan_runs
from connector.push_legs import Outgoing, PushAction, PushReport, StartWrite, StopWrites, open_of, verdict_of
from connector.push_states import PushEvent, PushState
from connector.settings import ConnectorSettings
from connector.side_channel import Cancelled, Hello, Opened, RecvReady, endpoint_of
from connector.tp_plan import consumer_of, servers_of
from connector.transfers import Outcome, TransferKey
from pdq.wire.types import unpack_ids

OVER = (PushState.DRAINING, PushState.TELLING, PushState.ENDED)


class PushCourse:
    """One for all pushes of a rank: they differ in their `Outgoing` only. `now` is monotonic seconds."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        hello: Hello,
        regions: Sequence[KvRegion],
        on_settled: Callable[[Outgoing, float], None],
    ) -> None:
        """`on_settled`: called once per push, when it has ended and its engine is through with it."""
        every_s, tries = settings.kv_answer_s, settings.kv_answer_tries
        self.greetings = Greetings(hello=hello, regions=regions, every_s=every_s, tries=tries)
        self.asks: Asks[TransferKey] = Asks(every_s=every_s, tries=tries)
        self.actions: list[PushAction] = []
        self.layers = tuple(region.layer for region in regions)
        self._hello = hello
        self._regions = {region.layer: region for region in regions}
        self._on_settled = on_settled
        self._job_ids = itertools.count(1)

    def ready(self, push: Outgoing, ready: RecvReady, now: float) -> None:
        push.ready, push.ready_at = ready, now
        push.fire(PushEvent.READY)
        hello, rank, misfit = self._hello, 0, ""
        try:
            rank = consumer_of(hello.rank, hello.tp_size, ready.tp_size)
            servers = servers_of(rank, ready.tp_size, hello.tp_size, hello.num_kv_heads, ready.transfer_id)
            push.is_spare = hello.rank in servers.spares
        except LayoutError as exc:
            misfit = str(exc)
        push.target_ids = [] if push.is_spare else unpack_ids(ready.block_ids)
        push.peer = Peer(endpoint=endpoint_of(ready.host, ready.port + rank), epoch=ready.consumer)
        if misfit:
            self.stop(push, Outcome.FAILED, misfit, now)
        elif push.request is not None:
            self.check_fit(push, now)
        self.meet(push, now)

    def check_fit(self, push: Outgoing, now: float) -> None:
        request, ready = push.request, push.ready
        assert request is not None
        assert ready is not None
        num_blocks = push.num_blocks - ready.first_block if push.target_ids else 0
        for what, here, there in (
            ("block size", request.block_size, ready.block_size),
            ("tokens", request.num_tokens, ready.num_tokens),
            ("blocks to write", num_blocks, len(push.target_ids)),
        ):
            if here != there:
                self.stop(push, Outcome.FAILED, f"{what}: {here} at P, {there} at D", now)
                return
        self.pump(push, now)

    def meet(self, push: Outgoing, now: float) -> None:
        if push.state is not PushState.GREETING or not push.target_ids:
            self.pump(push, now)
            return
        assert push.peer is not None
        if refusal := self.greetings.refusal(push.peer):
            self.stop(push, Outcome.FAILED, refusal, now)
        elif self.greetings.meta(push.peer) is None:
            self.greetings.greet(push.peer, now)
        else:
            push.fire(PushEvent.MET)
            self.asks.put(push.key, push.peer.endpoint, open_of(push, self._hello), now)

    def opened(self, push: Outgoing, answer: Opened, now: float) -> None:
        if answer.transport_generation == push.broken_generation:
            return  # said before D heard of the failure: the call's last bytes may still arrive there
        self.asks.answered(push.key)
        push.address, push.generation = answer.transport_address, answer.transport_generation
        push.broken_generation, push.is_drained = None, True
        push.fire(PushEvent.OPENED)
        self.pump(push, now)

    def pump(self, push: Outgoing, now: float) -> None:
        """Hands what is final and not yet queued to the writing thread; ends the push when there is nothing left."""
        if push.request is None or push.ready is None or push.outcome is not None:
            return
        if push.state is PushState.GREETING and not push.target_ids:
            if push.complete_at is not None:
                self._succeed(push, now)
            return
        if push.state is not PushState.WRITING:
            return
        spans: dict[tuple[int, int], list[str]] = {}
        for layer, final in push.final.items():
            begin, end = max(push.queued.get(layer, 0), push.ready.first_block), min(final, push.num_blocks)
            if begin < end:
                spans.setdefault((begin, end), []).append(layer)
                push.queued[layer] = end
        try:
            for (begin, end), layers in spans.items():
                self._write(push, begin, end, layers)
        except LayoutError as exc:
            self.stop(push, Outcome.FAILED, str(exc), now)
            return
        is_queued = all(push.queued.get(layer) == push.num_blocks for layer in self._regions)
        if is_queued and push.complete_at is not None and not push.jobs:
            self._succeed(push, now)

    def _write(self, push: Outgoing, begin: int, end: int, layers: list[str]) -> None:
        assert push.ready is not None
        assert push.peer is not None
        meta = self.greetings.meta(push.peer)
        if meta is None:
            raise LayoutError("D's regions were forgotten")
        first = push.ready.first_block
        runs = plan_runs(
            [self._regions[layer] for layer in layers],
            [region for region in meta.regions if region.layer in layers],
            push.blocks[begin:end],
            push.target_ids[begin - first : end - first],
        )
        job_id = next(self._job_ids)
        push.jobs.add(job_id)
        push.num_bytes += runs.num_bytes
        push.num_descriptors += len(runs)
        self.actions.append(StartWrite(job_id=job_id, push_id=push.push_id, address=push.address, runs=runs))

    def _succeed(self, push: Outgoing, now: float) -> None:
        push.outcome = Outcome.OK
        push.fire(PushEvent.WRITTEN)
        self._tell(push, now)

    def stop(self, push: Outgoing, outcome: Outcome, reason: str, now: float) -> None:
        """The first outcome stays. Nothing is queued any more; told when the calls under way have ended."""
        if push.state in OVER:
            return
        push.outcome, push.reason = outcome, reason
        self.asks.answered(push.key)
        push.fire(PushEvent.STOP)
        if push.state is PushState.DRAINING:
            self.actions.append(StopWrites(push_id=push.push_id))
            self.after_job(push, now)
        elif push.state is PushState.TELLING:
            self._tell(push, now)

    def after_job(self, push: Outgoing, now: float) -> None:
        if push.state is PushState.WRITING:
            self.pump(push, now)
        elif push.jobs:
            return
        elif push.state is PushState.DRAINING:
            push.fire(PushEvent.DRAINED)
            self._tell(push, now)
        elif push.state is PushState.OPENING and push.peer is not None:
            self.asks.put(push.key, push.peer.endpoint, open_of(push, self._hello), now)

    def _tell(self, push: Outgoing, now: float) -> None:
        """All calls have ended."""
        assert push.peer is not None
        if push.cancel_reply is None:
            self.asks.put(push.key, push.peer.endpoint, verdict_of(push, self._hello), now)
            return
        key, reply = push.key, push.cancel_reply
        push.cancel_reply = None
        epoch = push.ready.epoch if push.ready is not None else self._hello.consumer
        reply(Cancelled(epoch=epoch, transfer_id=key.transfer_id, pair=key.pair, is_drained=push.is_drained))
        self.told(push, now)

    def told(self, push: Outgoing, now: float) -> None:
        self.asks.answered(push.key)
        push.fire(PushEvent.TOLD)
        self.settle(push, now)

    def give_up(self, push: Outgoing, reason: str, now: float) -> None:
        """D is not there, or doesn't want it: it need not be told."""
        if push.outcome is None:
            push.outcome, push.reason = Outcome.FAILED, reason
        self.told(push, now)

    def settle(self, push: Outgoing, now: float) -> None:
        """Reports an ended push once, when its engine is through with it too; then it is a tombstone."""
        if push.state is not PushState.ENDED or not (push.is_left or push.request is None):
            return
        if push.is_settled:
            return
        push.is_settled = True
        if push.is_awaited:
            assert push.request is not None
            assert push.outcome is not None
            self.actions.append(
                PushReport(
                    engine_request_id=push.request.engine_request_id,
                    key=push.key,
                    peer="" if push.peer is None else push.peer.endpoint,
                    outcome=push.outcome,
                    reason=push.reason,
                    stats=push.stats,
                )
            )
        self._on_settled(push, now)
