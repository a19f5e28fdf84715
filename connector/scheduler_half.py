"""The half beside the scheduler: which requests need KV, delayed frees, renewals until the worker half claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import structlog

from connector.live_transfers import LiveTransfers
from connector.params import ParamsError, PullConsumer, PullProducer, PushConsumer, PushProducer, parse
from connector.pinned_prefills import PinnedPrefills
from connector.pushed_prefills import PushedPrefills
from connector.receivers import Receivers
from connector.renewal_thread import RenewalThread
from connector.settings import ConnectorSettings
from connector.step import Load, Scheduled, StepMeta, TransferResults
from connector.transfers import Outcome
from pdq.wire.types import KvSource, KvTicket

T = TypeVar("T")
Role = Literal["producer", "consumer", "both"]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Remote:
    ticket: KvTicket
    failed: str | None
    state: Literal["waiting", "loading", "over"] = "waiting"
    is_finished: bool = False
    is_gone: bool = False
    """P said so: it needs no last word."""


class SchedulerHalf:
    """Driven by the engine loop's thread, in vLLM's order. No method waits for the network."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        engine_id: str,
        epoch: str,
        host: str,
        side_channel_port: int,
        tp_size: int,
        block_size: int,
        role: Role,
        on_progress: Callable[[], None] | None = None,
    ) -> None:
        """`side_channel_port`: where rank 0's worker half listens, see `WorkerHalf.port`.

        `on_progress` is called from another thread when `take_gone` has something, so that an idle loop wakes.
        """
        self._block_size = block_size
        self._role = role
        self._renewals = RenewalThread(settings, consumer=epoch, tp_size=tp_size, on_progress=on_progress)
        self._pushed = PushedPrefills(block_size=block_size)
        self._receivers = Receivers(
            self._renewals, epoch=epoch, host=host, port=side_channel_port, tp_size=tp_size, block_size=block_size
        )
        self._pinned = PinnedPrefills(
            KvSource(
                engine_id=engine_id,
                epoch=epoch,
                host=host,
                port=side_channel_port,
                tp_size=tp_size,
                block_size=block_size,
            )
        )
        self._live = LiveTransfers(kept_s=2 * settings.kv_lease_s + 1.0)  # worker halves forget a moment later
        self._remotes: dict[str, _Remote] = {}
        self._gone: dict[str, str] = {}
        self._loads: list[Load] = []
        self._cancelled: list[str] = []

    def on_new_request(self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int) -> None:
        """Raises ParamsError: the request is to be refused. D: renewals of P's lease start."""
        request = parse(kv_params)
        if request is None:
            return
        is_producer = isinstance(request, PullProducer | PushProducer)
        if is_producer and self._role == "consumer":
            raise ParamsError("do_remote_decode: this engine is a consumer, it hands no KV over")
        if not is_producer and self._role == "producer":
            raise ParamsError("do_remote_prefill: this engine is a producer, it takes no KV")
        self._live.check(request, time.monotonic())
        match request:
            case PullProducer():
                self._pinned.add(engine_request_id, request, num_tokens)
            case PushProducer():
                self._pushed.add(engine_request_id, request, num_tokens)
            case PushConsumer():
                self._receivers.add(engine_request_id, request, num_tokens)
            case PullConsumer():
                self._add_remote(engine_request_id, request, num_tokens)
        self._live.begin(engine_request_id, request)

    def _add_remote(self, engine_request_id: str, request: PullConsumer, num_tokens: int) -> None:
        failed = self._misfit(request.ticket, num_tokens)
        self._remotes[engine_request_id] = _Remote(request.ticket, failed)
        if failed is None:
            self._renewals.renew(engine_request_id, request.ticket)

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """(tokens to come from P beyond `num_computed_tokens`, load is asynchronous). No side effects.

        0 also when the last token is all that is missing: it is computed here anyway.
        """
        if engine_request_id in self._receivers:
            num_missing = self._receivers.num_missing(engine_request_id, num_computed_tokens)
            return num_missing, num_missing > 0
        remote = self._remotes.get(engine_request_id)
        if remote is None or remote.state != "waiting":
            return 0, False
        if num_computed_tokens >= num_tokens - 1:
            return 0, False
        num_new = min(remote.ticket.num_tokens, num_tokens) - num_computed_tokens
        return (num_new, True) if num_new > 0 else (0, False)

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """`block_ids`: all blocks of the request, in order. 0 external tokens: P is told that nobody will read."""
        if engine_request_id in self._receivers:
            self._receivers.allocated(engine_request_id, block_ids, num_external_tokens)
            return
        self._pinned.allocated(engine_request_id)
        remote = self._remotes.get(engine_request_id)
        if remote is None or remote.state != "waiting":
            return
        ticket = remote.ticket
        self._renewals.stop(engine_request_id)
        if num_external_tokens == 0:
            remote.state = "over"
            if remote.failed is None:
                self._renewals.say_done(ticket, Outcome.OK, "found in the local prefix cache")
            return
        remote.state = "loading"
        needed = -(-ticket.num_tokens // ticket.block_size)
        if len(block_ids) < needed and remote.failed is None:
            remote.failed = f"{len(block_ids)} blocks were allocated, P has {needed}"
        self._loads.append(
            Load(
                engine_request_id=engine_request_id,
                ticket=ticket,
                block_ids=tuple(block_ids[:needed]),
                first_block=max(ticket.num_tokens - num_external_tokens, 0) // self._block_size,
                failed=remote.failed,
            )
        )

    def build_connector_meta(self, scheduled: Iterable[Scheduled] = (), preempted: Iterable[str] = ()) -> StepMeta:
        """Each step, also empty ones, with what it computes and whose blocks it takes away. Resets the queues."""
        self._collect_gone()
        taken = self._pushed.preempted(preempted)  # before their chunks of this very step
        loads = [
            replace(load, failed=self._remotes[load.engine_request_id].failed)
            if load.failed is None and load.engine_request_id in self._remotes
            else load
            for load in _take(self._loads)
        ]
        return StepMeta(
            expected=tuple(_take(self._pinned.expected)),
            pinned=tuple(_take(self._pinned.pinned)),
            forgotten=tuple(_take(self._pinned.forgotten)),
            released=tuple(_take(self._pinned.released)),
            loads=tuple(loads),
            cancelled=(*_take(self._cancelled), *_take(self._receivers.cancelled)),
            pushes=tuple(_take(self._pushed.pushes)),
            preempted=taken,
            saves=tuple(self._pushed.saves(scheduled)),
            pushed=tuple(_take(self._pushed.pushed)),
            stopped=tuple(_take(self._pushed.stopped)),
            receives=tuple(_take(self._receivers.receives)),
            lost=tuple(self._receivers.lost()),
        )

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        """(True, KV params): keep the blocks until `finished_sending`. Finish: prefilled, stop, length, aborted, error.

        D: blocks of a request whose load is active stay allocated until its id is in `finished_recving`.
        """
        is_kept, params = self._finished(engine_request_id, block_ids, finish)
        if not is_kept and not self.is_loading(engine_request_id):
            self._live.end(engine_request_id, time.monotonic())
        return is_kept, params

    def _finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        if (is_kept := self._pushed.finished(engine_request_id, block_ids, finish)) is not None:
            return is_kept, None
        if engine_request_id in self._receivers:
            self._receivers.finished(engine_request_id, finish)
            return False, None
        if (kept := self._pinned.finished(engine_request_id, block_ids, finish)) is not None:
            return kept
        remote = self._remotes.get(engine_request_id)
        if remote is None:
            return False, None
        if remote.state == "loading":
            if not remote.is_finished:
                self._cancelled.append(engine_request_id)
            remote.is_finished = True
            return False, None
        del self._remotes[engine_request_id]
        self._collect_gone()
        if remote.state == "waiting":
            self._renewals.stop(engine_request_id)
            self._gone.pop(engine_request_id, None)
            if not remote.is_gone:
                self._renewals.say_done(remote.ticket, Outcome.CANCELLED, f"{finish} before it was scheduled")
        return False, None

    def is_loading(self, engine_request_id: str) -> bool:
        """D: its blocks are being written, or may be; they stay allocated until it is in `finished_recving`."""
        return self._is_loading(engine_request_id) or self._receivers.is_receiving(engine_request_id)

    def is_pushing(self, engine_request_id: str) -> bool:
        """P: `build_connector_meta` has to be told of its chunks."""
        return engine_request_id in self._pushed

    def release(self, engine_request_id: str) -> None:
        """P: nobody will come for this finished prefill. Unknown ids are ignored."""
        self._pushed.release(engine_request_id)
        self._pinned.release(engine_request_id)

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Before the engine frees blocks. Returns the results without ids that nobody waits for."""
        sent = self._pushed.take_sent(results.finished_sending) | self._pinned.take_sent(results.finished_sending)
        loaded = {request_id for request_id in results.finished_recving if self._is_loading(request_id)}
        received = self._receivers.take_received(results.finished_recving) | loaded
        if dropped := (results.finished_sending - sent) | (results.finished_recving - received):
            log.error("kv_report_dropped", engine_request_ids=sorted(dropped))
        for engine_request_id in loaded:
            remote = self._remotes[engine_request_id]
            remote.state = "over"
            if remote.is_finished:
                del self._remotes[engine_request_id]
        for engine_request_id in sent | received:
            self._live.end(engine_request_id, time.monotonic())
        return replace(results, finished_sending=sent, finished_recving=received)

    def take_gone(self) -> dict[str, str]:
        """D: waiting requests whose KV P no longer has, with the reason; each once. Optional to ask:
        a load of such a request fails with the same reason."""
        self._collect_gone()
        gone, self._gone = self._gone, {}
        return gone

    def has_pending_meta(self) -> bool:
        """True: a step is needed, also without a request to run, since `build_connector_meta` has something to say."""
        sides = (self._pinned, self._pushed, self._receivers)
        return bool(self._loads or self._cancelled) or any(side.has_news() for side in sides)

    def shutdown(self) -> None:
        """Idempotent."""
        self._renewals.close()

    def _is_loading(self, engine_request_id: str) -> bool:
        remote = self._remotes.get(engine_request_id)
        return remote is not None and remote.state == "loading"

    def _misfit(self, ticket: KvTicket, num_tokens: int) -> str | None:
        if ticket.block_size != self._block_size:
            return f"block size {ticket.block_size} at P, {self._block_size} here"
        if ticket.num_tokens > num_tokens:
            return f"P has KV of {ticket.num_tokens} tokens, the request has {num_tokens}"
        return None

    def _collect_gone(self) -> None:
        for engine_request_id, reason in self._renewals.take_gone().items():
            remote = self._remotes.get(engine_request_id)
            if remote is not None and remote.state != "over":
                remote.failed = remote.failed or reason
                remote.is_gone = True
                if remote.state == "waiting":
                    self._gone[engine_request_id] = reason


def _take(items: list[T]) -> list[T]:
    """Empties the list."""
    taken = items[:]
    items.clear()
    return taken
