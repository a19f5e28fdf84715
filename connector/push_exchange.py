"""Push inside a worker half's IO thread: joins both cores with the writing thread, the links and the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from connector.layout import KvRegion
from connector.legs import Send
from connector.links import SideLinks
from connector.push_legs import FenceTransport, PushReport, ReplyTo, StartWrite, StopWrites
from connector.pushes import NO_READER, Pushes
from connector.receptions import Receptions
from connector.results import Results
from connector.settings import ConnectorSettings
from connector.side_channel import (
    Answer,
    Cancel,
    Cancelled,
    Gone,
    Hello,
    Open,
    PushAck,
    PushDone,
    PushFail,
    PushRequest,
    RecvReady,
)
from connector.step import StepMeta
from connector.transfers import IllegalTransition, Outcome, TransferKey
from connector.transport import Transport
from connector.writer import WriteEvent, Writer
from pdq.wire.types import TransferStats

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSaved:
    """The forward has written all of the step's KV of this layer."""

    layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSaved:
    """... of all layers, by `at` (monotonic seconds)."""

    at: float


class PushExchange:
    """Belongs to the IO thread. `now` is in seconds of a monotonic clock."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        hello: Hello,
        regions: Sequence[KvRegion],
        transport: Transport,
        results: Results,
        on_event: Callable[[], None],
    ) -> None:
        """`on_event`: called from the writing thread when `tick` has something to take."""
        self._epoch = hello.consumer
        self._results = results
        self._writer = Writer(transport, settings, name=f"kv-writer-{hello.rank}", on_event=on_event)
        self._pushes = Pushes(settings, hello=hello, regions=regions)
        self._receptions = Receptions(
            settings, hello=hello, transport_at=lambda: (transport.address, transport.generation)
        )
        self._quiet: list[tuple[tuple[str, ...], threading.Event]] = []

    def apply(self, meta: StepMeta, now: float) -> None:
        """Push's part of a step."""
        for push in meta.pushes:
            self._pushes.expect(push, now)
        self._pushes.preempt(meta.preempted)
        if meta.saves:
            self._pushes.begin_step(meta.saves)
        for engine_request_id in meta.pushed:
            self._pushes.pushed(engine_request_id, now)
        for stopped in meta.stopped:
            self._pushes.stop(stopped, now)
        for receive in meta.receives:
            self._receptions.start(receive, now)
        for engine_request_id in meta.cancelled:
            self._receptions.cancel(engine_request_id, now)
        for lost in meta.lost:
            self._receptions.lose(lost, now)

    def saved(self, news: LayerSaved | StepSaved, now: float) -> None:
        if isinstance(news, LayerSaved):
            self._pushes.layer_saved(news.layer, now)
        else:
            self._pushes.end_step(news.at, now)

    def when_quiet(self, engine_request_ids: tuple[str, ...], event: threading.Event) -> None:
        """Sets the event once no call reads blocks of these requests."""
        self._quiet.append((engine_request_ids, event))

    def on_request(self, message: PushRequest, reply: ReplyTo, now: float) -> None:
        if message.epoch != self._epoch:
            reply(other_epoch(message, self._epoch))
        elif isinstance(message, RecvReady):
            self._pushes.recv_ready(message, reply, now)
        elif isinstance(message, Cancel):
            self._pushes.cancel(message, reply, now)
        else:
            self._receptions.on_message(message, reply, now)

    def on_answer(self, endpoint: str, answer: Answer, now: float) -> None:
        """Of any kind; what is not push's is ignored."""
        self._pushes.on_answer(endpoint, answer, now)
        self._receptions.on_answer(endpoint, answer, now)

    def tick(self, links: SideLinks, now: float) -> None:
        """Takes over what the writing thread did, then does what the cores want."""
        for event in self._writer.take_events():
            try:
                self._on_write_event(event, now)
            except IllegalTransition:
                log.exception("kv_write_event_refused", push_id=event.push_id, kind=event.kind)
        self._pushes.tick(now)
        self._receptions.tick(now)
        for action in (*self._pushes.take_actions(), *self._receptions.take_actions()):
            if isinstance(action, Send):
                links.send(action.endpoint, action.message, now)
            elif isinstance(action, StartWrite):
                self._writer.submit(action.job_id, action.push_id, action.address, action.runs)
            elif isinstance(action, StopWrites):
                self._writer.stop(action.push_id)
            elif isinstance(action, FenceTransport):
                log.warning("kv_fence_against_writers")
                self._writer.fence()
            elif isinstance(action, PushReport):
                self._results.sent(action.engine_request_id)
                self._results.announce_sent()
                if action.reason.startswith(NO_READER):
                    self._results.count("prefills_expired")
                _log_end("push", action.outcome, action.key, action.peer, action.stats, action.reason)
            else:
                receive, source = action.receive, action.receive.source
                if action.outcome is Outcome.OK:
                    self._results.loaded(receive.engine_request_id, action.stats)
                else:
                    reason = action.reason if action.outcome is Outcome.FAILED else None
                    self._results.not_loaded(receive.engine_request_id, reason)
                key = TransferKey(transfer_id=receive.transfer_id, pair=receive.pair)
                peer = f"{source.engine_id} at {source.host}:{source.port}"
                _log_end("receive", action.outcome, key, peer, action.stats, action.reason)
        for waiting in list(self._quiet):
            if all(self._pushes.is_quiet(engine_request_id) for engine_request_id in waiting[0]):
                self._quiet.remove(waiting)
                waiting[1].set()

    def next_at(self) -> float | None:
        times = [self._pushes.next_at(), self._receptions.next_at()]
        return min((at for at in times if at is not None), default=None)

    def close(self) -> None:
        """Ends the writing thread after its call in flight. Idempotent."""
        self._writer.close()

    def _on_write_event(self, event: WriteEvent, now: float) -> None:
        if event.kind == "written":
            self._pushes.written(event.job_id, event.push_id, event.began, event.ended, now)
        elif event.kind == "dropped":
            self._pushes.dropped(event.job_id, event.push_id, now)
        elif event.kind == "broken":
            self._results.count("retries")
            self._receptions.fenced(now)  # our own failed call: whoever writes here was shut out too
            self._pushes.broken(event.job_id, event.push_id, event.cause, event.is_stalled, now)
        elif event.kind == "fenced":
            self._results.count("fences")
            self._receptions.fenced(now)
        else:
            self._results.fail(f"no fence after a failed write: {event.cause}")


def other_epoch(message: PushRequest, epoch: str) -> Answer:
    """The answer to what was meant for an engine that was here before. `epoch`: of the one that is here now."""
    names = {"epoch": message.epoch, "transfer_id": message.transfer_id}
    if isinstance(message, Cancel):  # dead writers' last bytes may be in the peer's own buffers
        return Cancelled(**names, pair=message.pair, is_drained=False)
    if isinstance(message, PushDone | PushFail):
        return PushAck(**names, pair=message.pair)
    assert isinstance(message, RecvReady | Open)
    return Gone(**names, pair=message.pair, reason=f"restarted: epoch {epoch}, not {message.epoch}")


def _log_end(what: str, outcome: Outcome, key: TransferKey, peer: str, stats: TransferStats, cause: str) -> None:
    write = log.warning if outcome is Outcome.FAILED else log.debug
    write(
        f"kv_{what}_{outcome.value}",
        request_id=key.transfer_id,
        pair=str(key.pair),
        peer=peer,
        num_bytes=stats.num_bytes,
        num_descriptors=stats.num_descriptors,
        seconds=round(stats.seconds, 6),
        hidden_seconds=round(stats.hidden_seconds, 6),
        cause=cause,
    )
