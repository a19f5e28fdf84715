"""The thread that owns a worker half's sockets and both cores: it waits on the network so that the engine need not.

Each turn: commands of the engine's thread -> sockets -> events of the reading thread -> timers -> what the cores want.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from connector.exclusive_transport import ExclusiveTransport
from connector.layout import KvRegion
from connector.legs import Report, Send, StartRead, StopRead
from connector.links import SideLinks
from connector.loads import Loads
from connector.producer import EXPIRED, Producer
from connector.push_exchange import LayerSaved, PushExchange, StepSaved
from connector.quick_reads import NAP_S, QuickReads
from connector.reader import Reader, ReadEvent
from connector.results import Results
from connector.settings import ConnectorSettings
from connector.side_channel import Hello, PullRequest, PushRequest, Renew, Request, SideMessage
from connector.step import StepMeta
from connector.transfers import IllegalTransition, Outcome
from connector.transport import Transport
from pdq.wire.blocking import BlockingInbox, BlockingLink, Hub

log = structlog.get_logger(__name__)

_MAX_WAIT_S: Final = 0.5
"""How late the end of a lease may be noticed."""
_TICK_S: Final = 0.05
"""The same while messages come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """Sets the event once no call reads blocks of these requests."""

    engine_request_ids: tuple[str, ...]
    event: threading.Event


class IoThread:
    """`start`, `submit` and `close` are called from outside; all else happens in the thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        inbox: BlockingInbox[SideMessage],
        transport: Transport,
        regions: Sequence[KvRegion],
        hello: Hello,
        results: Results,
        on_progress: Callable[[], None],
    ) -> None:
        """`hello`: who this rank is; also what readers are compared with."""
        self._settings = settings
        self._inbox = inbox
        self._results = results
        self._on_progress = on_progress
        self._hub = Hub()
        self._hub.add(inbox)
        self._links = SideLinks(self._hub, settings, identity=f"{hello.consumer}/{hello.rank}")
        self._commands: deque[StepMeta | LayerSaved | StepSaved | Quiet] = deque()
        self._closing = False
        self._tick_at = 0.0
        self._tell_sent_at: float | None = None
        """When the engine is to be told of freed pins, if no step of its own finds them before."""
        self.is_hurried = False
        """Any thread. Freed pins are told at once: the engine is short of blocks."""
        transport = ExclusiveTransport(transport)
        self._exchange = PushExchange(
            settings,
            hello=hello,
            regions=regions,
            transport=transport,
            results=results,
            on_event=self._hub.wake,
        )
        self._reader = Reader(transport, settings, name=f"kv-reader-{hello.rank}", on_event=self._hub.wake)
        self._quick = QuickReads(transport, self._reader, settings)
        self._loads = Loads(settings, hello=hello, regions=regions)
        self._producer = Producer(
            epoch=hello.consumer,
            rank=hello.rank,
            tp_size=hello.tp_size,
            fingerprint=hello.fingerprint,
            regions=tuple(regions),
            lease_s=settings.kv_lease_s,
            hold_s=settings.kv_hold_s,
            transport_at=lambda: (transport.address, transport.generation),
            num_kv_heads=hello.num_kv_heads,
        )
        self._thread = threading.Thread(target=self._run, name=f"kv-io-{hello.rank}", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._thread.start()

    def submit(self, meta: StepMeta) -> None:
        """Any thread. What the step asks for; comes into force in order, and before any reader is answered.

        What only concerns later readers waits for the next message instead of costing a wake-up.
        """
        self._commands.append(meta)
        is_push = meta.pushed or meta.stopped or meta.receives or meta.lost
        if is_push or meta.loads or meta.cancelled or meta.released or self._producer.has_parked:
            self._hub.wake()

    def tell(self, news: LayerSaved | StepSaved | Quiet) -> None:
        """Any thread. In order with what was submitted."""
        self._commands.append(news)
        self._hub.wake()

    def close(self) -> None:
        """Tells readers, ends both threads and the transport, closes the sockets. Idempotent."""
        self._closing = True
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                ready = self._wait()
                try:
                    self._turn(ready)
                except Exception:  # a consume loop
                    log.exception("kv_io_turn_failed")
            self._producer.abort_readers("P is shutting down")
        finally:
            if not self._closing:
                self._results.fail("the connector's IO thread has ended")
                self._on_progress()
            self._exchange.close()
            self._reader.close()
            self._links.close()
            self._inbox.close()
            self._hub.close()

    def _wait(self) -> Sequence[object]:
        """Until there is anything to do; the sockets with messages."""
        while self._quick and not self._quick.look():
            time.sleep(NAP_S)
            if (ready := self._hub.wait(0)) or self._commands or self._closing:
                return ready
        return self._hub.wait(0 if self._quick else self._wait_ms())

    def _wait_ms(self) -> int:
        if self._commands or self._quick.has_finished:
            return 0
        times = (self._loads.next_at(), self._exchange.next_at(), self._tell_sent_at)
        next_at = min((at for at in times if at is not None), default=None)
        wait_s = _MAX_WAIT_S if next_at is None else min(max(next_at - time.monotonic(), 0.0), _MAX_WAIT_S)
        return int(wait_s * 1000 + 0.999)

    def _turn(self, ready: Sequence[object]) -> None:
        now = time.monotonic()
        asked = [item for socket in ready if isinstance(socket, BlockingInbox) for item in socket.receive()]
        # After receiving, before answering: a reader that was told of a prefill is never faster than the prefill's pin.
        while self._commands:
            self._apply(self._commands.popleft(), now)
        for message, reply in asked:
            if isinstance(message, PullRequest):
                if isinstance(message, Renew):
                    self._results.count("renewals")
                self._producer.on_message(message, reply, now)
            elif isinstance(message, PushRequest):
                self._exchange.on_request(message, reply, now)
        for socket in ready:
            if isinstance(socket, BlockingLink):
                for answer in self._links.receive(socket):
                    if not isinstance(answer, Request):
                        self._loads.on_message(socket.endpoint, answer, now)
                        self._exchange.on_answer(socket.endpoint, answer, now)
        for leg_id in self._quick.take_finished():
            self._on_read_event(ReadEvent(leg_id=leg_id, kind="read"), now)
        for event in self._reader.take_events():
            self._on_read_event(event, now)
        if self._tick_at <= now:  # looks at every pin
            self._tick_at = now + _TICK_S
            self._producer.tick(now)
        self._loads.tick(now)
        if (num_ignored := self._loads.take_ignored()) > 0:
            self._results.count("answers_ignored", num_ignored)
        self._act(now)
        self._exchange.tick(self._links, now)
        self._links.close_idle(now)
        for pin in self._producer.take_freed():
            self._results.sent(pin.engine_request_id)
            if pin.cause in EXPIRED:
                self._results.count("prefills_expired")
            if self._tell_sent_at is None:
                self._tell_sent_at = now + (0.0 if self.is_hurried else self._settings.kv_release_delay_s)
        if self._tell_sent_at is not None and self._tell_sent_at <= now:
            self._tell_sent_at = None
            self._results.announce_sent()
        if self._results.has_news():
            self._on_progress()

    def _apply(self, meta: StepMeta | LayerSaved | StepSaved | Quiet, now: float) -> None:
        if isinstance(meta, LayerSaved | StepSaved):
            self._exchange.saved(meta, now)
            return
        if isinstance(meta, Quiet):
            self._exchange.when_quiet(meta.engine_request_ids, meta.event)
            return
        self._exchange.apply(meta, now)
        self._producer.apply(meta, now)
        for load in meta.loads:
            self._loads.start(load, now)
        for engine_request_id in meta.cancelled:
            self._loads.cancel(engine_request_id, now)

    def _on_read_event(self, event: ReadEvent, now: float) -> None:
        try:
            if event.kind == "read":
                self._loads.read(event.leg_id, now)
            elif event.kind == "drained":
                self._loads.drained(event.leg_id, now)
            elif event.kind == "broken":
                self._loads.broken(event.leg_id, event.cause, now, is_peer_lost=event.is_peer_lost)
            elif event.kind == "fenced":
                self._results.count("fences")
                self._loads.fenced(event.leg_id, now)
            else:
                self._results.fail(f"no fence after a failed read: {event.cause}")
        except IllegalTransition:
            log.exception("kv_read_event_refused", leg_id=event.leg_id, kind=event.kind)

    def _act(self, now: float) -> None:
        for action in self._loads.take_actions():
            if isinstance(action, Send):
                self._links.send(action.endpoint, action.message, now)
            elif isinstance(action, StartRead):
                self._quick.begin(action)
            elif isinstance(action, StopRead):
                if not self._quick.stop(action.leg_id):
                    self._reader.stop(action.leg_id)
            else:
                self._report(action)

    def _report(self, report: Report) -> None:
        load = report.load
        ticket = load.ticket
        if report.outcome is Outcome.OK:
            self._results.loaded(load.engine_request_id, report.stats)
        else:
            reason = report.reason if report.outcome is Outcome.FAILED else None
            self._results.not_loaded(load.engine_request_id, reason)
        write = log.warning if report.outcome is Outcome.FAILED else log.debug
        write(
            f"kv_transfer_{report.outcome.value}",
            request_id=ticket.transfer_id,
            pair=str(ticket.pair),
            peer=f"{ticket.engine_id} at {ticket.host}:{ticket.port}",
            num_bytes=report.stats.num_bytes,
            num_descriptors=report.stats.num_descriptors,
            seconds=round(report.stats.seconds, 6),
            cause=report.reason,
        )
