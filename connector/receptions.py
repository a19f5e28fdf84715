"""D's side of all pushes into one rank's blocks: who may write, and when they are written or safe again. Pure.

A reception has one leg per P rank that writes here. It is reported when no leg can write its blocks any more: OK when
all legs are done with the right number of tokens, else failed or cancelled. The first cause wins and stops the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from connector.asks import Asks
from connector.layout import LayoutError
from connector.legs import Send
from connector.push_legs import FenceTransport, Incoming, ReceiveAction, ReceiveReport, RecvLeg, ReplyTo
from connector.push_states import SETTLED, RecvEvent, RecvState
from connector.settings import ConnectorSettings
from connector.side_channel import (
    Answer,
    Cancel,
    Cancelled,
    Gone,
    Hello,
    Open,
    Opened,
    PushAck,
    PushDone,
    PushFail,
    endpoint_of,
)
from connector.step import Lost, Receive
from connector.tp_plan import servers_of
from connector.transfers import USED_TWICE, Outcome, TransferKey
from pdq.wire.types import TransferStats


class Receptions:
    """`now` is in seconds of a monotonic clock. Ids, keys and answers that are not known (any more) are ignored."""

    def __init__(
        self, settings: ConnectorSettings, *, hello: Hello, transport_at: Callable[[], tuple[str, int]]
    ) -> None:
        """`hello`: who this rank is. `transport_at`: address and generation of its transport now."""
        self._settings = settings
        self._hello = hello
        self._transport_at = transport_at
        self._asks: Asks[tuple[str, TransferKey]] = Asks(every_s=settings.kv_answer_s, tries=settings.kv_answer_tries)
        """Cancels, by P's rank's endpoint."""
        self._incoming: dict[TransferKey, Incoming] = {}
        self._key_of: dict[str, TransferKey] = {}
        self._verdicts: dict[TransferKey, str] = {}
        self._tombstones: deque[tuple[float, TransferKey]] = deque()
        self._parked: dict[tuple[TransferKey, int], tuple[Open | PushFail, ReplyTo, float]] = {}
        """What came before its reception, and Opens that wait for a fence; until when."""
        self._is_fencing = False
        self._actions: list[ReceiveAction] = []

    def __len__(self) -> int:
        return len(self._incoming)

    # What D's own engine says.

    def start(self, receive: Receive, now: float) -> None:
        """P was told of the blocks. The id is reported once, whatever happens."""
        key = TransferKey(transfer_id=receive.transfer_id, pair=receive.pair)
        if receive.engine_request_id in self._key_of:
            return
        if key in self._incoming or key in self._verdicts:  # a late PUSH_DONE would be taken for this one's
            no_stats = TransferStats(num_bytes=0, num_descriptors=0, seconds=0.0)
            self._actions.append(
                ReceiveReport(receive=receive, outcome=Outcome.FAILED, reason=USED_TWICE, stats=no_stats)
            )
            return
        incoming = Incoming(receive=receive, key=key, deadline=now + self._settings.kv_push_wait_s)
        self._incoming[key] = incoming
        self._key_of[receive.engine_request_id] = key
        source, hello = receive.source, self._hello
        try:
            servers = servers_of(hello.rank, hello.tp_size, source.tp_size, hello.num_kv_heads, receive.transfer_id)
            ranks = servers.sources
        except LayoutError as exc:
            ranks = ()
            self._decide(incoming, Outcome.FAILED, str(exc), now)
        for rank in ranks:
            incoming.legs[rank] = RecvLeg(rank=rank, endpoint=endpoint_of(source.host, source.port + rank))
        self._answer_parked(now)
        self._finish_if_settled(incoming, now)

    def cancel(self, engine_request_id: str, now: float) -> None:
        """Reported as soon as its blocks are safe."""
        self._end(engine_request_id, Outcome.CANCELLED, "the request was aborted", now)

    def lose(self, lost: Lost, now: float) -> None:
        """A P that does not answer is fenced at once: to wait for its word on CANCEL as well would only take longer."""
        self._end(lost.engine_request_id, Outcome.FAILED, lost.reason, now, is_silent=lost.is_silent)

    # What P's ranks say.

    def on_message(self, message: Open | PushDone | PushFail, reply: ReplyTo, now: float) -> None:
        incoming = self._incoming.get(message.key)
        if incoming is None and message.key not in self._verdicts and not isinstance(message, PushDone):
            # The scheduler half told P before this half heard of it: a matter of milliseconds. A PushDone comes so
            # early only when nothing is written here.
            self._parked[message.key, message.rank] = message, reply, now + self._settings.kv_answer_s
            return
        leg = None if incoming is None else incoming.legs.get(message.rank)
        if incoming is not None and message.producer != incoming.receive.source.epoch:
            leg = None
        if isinstance(message, Open):
            self._open(message, reply, incoming, leg, now)
            return
        reply(PushAck(epoch=message.epoch, transfer_id=message.transfer_id, pair=message.pair))
        if incoming is None or leg is None or leg.state in SETTLED or leg.state is RecvState.FENCING:
            return
        self._asks.answered((leg.endpoint, incoming.key))
        if isinstance(message, PushFail):
            self._decide(incoming, Outcome.FAILED, f"P failed: {message.reason}", now, but=leg)
            self._ended(leg, is_drained=message.is_drained)
        elif message.is_spare:
            reason = f"rank {message.rank} of P wrote nothing: its number of KV heads must differ"
            self._decide(incoming, Outcome.FAILED, reason, now, but=leg)
            self._ended(leg, is_drained=True)
        elif message.num_tokens != incoming.receive.num_tokens:
            reason = f"P wrote {message.num_tokens} tokens, {incoming.receive.num_tokens} were expected"
            self._decide(incoming, Outcome.FAILED, reason, now, but=leg)
            self._ended(leg, is_drained=True)
        else:
            leg.fire(RecvEvent.DONE)
            leg.stats = TransferStats(
                num_bytes=message.num_bytes,
                num_descriptors=message.num_descriptors,
                seconds=message.seconds,
                hidden_seconds=message.hidden_seconds,
            )
        self._finish_if_settled(incoming, now)

    def on_answer(self, endpoint: str, answer: Answer, now: float) -> None:
        if not isinstance(answer, Cancelled):
            return
        self._asks.answered((endpoint, answer.key))
        incoming = self._incoming.get(answer.key)
        if incoming is None:
            return
        for leg in incoming.legs.values():
            if leg.endpoint == endpoint and leg.state is RecvState.CANCELLING:
                self._ended(leg, is_drained=answer.is_drained)
        self._finish_if_settled(incoming, now)

    def fenced(self, now: float) -> None:
        """No address told before leads anywhere."""
        for incoming in self._incoming.values():
            for leg in incoming.legs.values():
                if leg.state not in SETTLED:
                    leg.fire(RecvEvent.FENCED)
                    if leg.state is RecvState.SAFE:
                        self._asks.answered((leg.endpoint, incoming.key))
        self._is_fencing = False  # only now: an address told in between would count as one from before
        for incoming in list(self._incoming.values()):
            self._finish_if_settled(incoming, now)
        self._answer_parked(now)

    # Time.

    def tick(self, now: float) -> None:
        for incoming in list(self._incoming.values()):
            if incoming.outcome is None and incoming.deadline <= now:
                waited_s = self._settings.kv_push_wait_s
                self._decide(incoming, Outcome.FAILED, f"not written within {waited_s:g} s", now)
                self._finish_if_settled(incoming, now)
        asks, silent = self._asks.due(now)
        self._actions += [Send(endpoint=endpoint, message=message) for endpoint, message in asks]
        for endpoint, key in silent:
            waiting = self._incoming.get(key)
            for leg in () if waiting is None else waiting.legs.values():
                if leg.endpoint == endpoint and leg.state is RecvState.CANCELLING:
                    self._ended(leg, is_drained=False)
        for parked, (_, _, until) in list(self._parked.items()):
            if until <= now:
                del self._parked[parked]
        while self._tombstones and self._tombstones[0][0] <= now:
            self._verdicts.pop(self._tombstones.popleft()[1], None)

    def next_at(self) -> float | None:
        return self._asks.next_at()

    def take_actions(self) -> list[ReceiveAction]:
        actions, self._actions = self._actions, []
        return actions

    # How it goes on.

    def _open(self, message: Open, reply: ReplyTo, incoming: Incoming | None, leg: RecvLeg | None, now: float) -> None:
        def refuse(reason: str) -> None:
            reply(Gone(epoch=message.epoch, transfer_id=message.transfer_id, pair=message.pair, reason=reason))

        if incoming is None:
            refuse(self._verdicts[message.key])
        elif leg is None or leg.state not in (RecvState.AWAITED, RecvState.OPEN):
            refuse(incoming.reason or f"rank {message.rank} of {message.producer} is not expected to write")
        else:
            address, generation = self._transport_at()
            if message.broken_generation == generation or self._is_fencing:
                self._parked[message.key, message.rank] = message, reply, now + self._settings.kv_wait_s
                self._fence()
                return
            leg.fire(RecvEvent.OPEN)
            reply(
                Opened(
                    epoch=message.epoch,
                    transfer_id=message.transfer_id,
                    pair=message.pair,
                    transport_address=address,
                    transport_generation=generation,
                )
            )

    def _answer_parked(self, now: float) -> None:
        answered = [parked for parked in self._parked if parked[0] in self._incoming or parked[0] in self._verdicts]
        for parked in answered:
            if parked in self._parked:  # one that ends its reception has the others answered
                message, reply, _ = self._parked.pop(parked)
                self.on_message(message, reply, now)

    def _end(
        self, engine_request_id: str, outcome: Outcome, reason: str, now: float, *, is_silent: bool = False
    ) -> None:
        key = self._key_of.get(engine_request_id)
        if key is None:
            return
        incoming = self._incoming[key]
        self._decide(incoming, outcome, reason, now)
        for leg in incoming.legs.values():
            if is_silent and leg.state is RecvState.CANCELLING:
                self._ended(leg, is_drained=False)
        self._finish_if_settled(incoming, now)

    def _decide(
        self, incoming: Incoming, outcome: Outcome, reason: str, now: float, but: RecvLeg | None = None
    ) -> None:
        """The first decision stays. P's ranks are told to stop; only those that may write are waited for."""
        if incoming.outcome is not None:
            return
        incoming.outcome, incoming.reason = outcome, reason
        key = incoming.key
        for leg in incoming.legs.values():
            if leg is but or leg.state in SETTLED or leg.state is RecvState.FENCING:
                continue
            leg.fire(RecvEvent.STOP)
            cancel = Cancel(
                epoch=incoming.receive.source.epoch,
                transfer_id=key.transfer_id,
                pair=key.pair,
                consumer=self._hello.consumer,
                reason=reason,
            )
            self._asks.put((leg.endpoint, key), leg.endpoint, cancel, now)

    def _ended(self, leg: RecvLeg, *, is_drained: bool) -> None:
        leg.fire(RecvEvent.DRAINED if is_drained else RecvEvent.DOUBT)
        if leg.state is RecvState.FENCING:
            self._fence()

    def _fence(self) -> None:
        """One that ends after now shuts out all that is in doubt now: no address is told meanwhile."""
        if not self._is_fencing:
            self._is_fencing = True
            self._actions.append(FenceTransport())

    def _finish_if_settled(self, incoming: Incoming, now: float) -> None:
        legs = incoming.legs.values()
        if incoming.key not in self._incoming or any(leg.state not in SETTLED for leg in legs):
            return
        outcome = incoming.outcome or Outcome.OK
        del self._incoming[incoming.key]
        del self._key_of[incoming.receive.engine_request_id]
        self._verdicts[incoming.key] = incoming.reason or "it was written"
        self._tombstones.append((now + 2 * self._settings.kv_lease_s, incoming.key))
        all_stats = [leg.stats for leg in legs if leg.stats is not None]
        stats = TransferStats(
            num_bytes=sum(stats.num_bytes for stats in all_stats),
            num_descriptors=sum(stats.num_descriptors for stats in all_stats),
            seconds=max((stats.seconds for stats in all_stats), default=0.0),
            hidden_seconds=max((stats.hidden_seconds for stats in all_stats), default=0.0),
        )
        self._actions.append(
            ReceiveReport(receive=incoming.receive, outcome=outcome, reason=incoming.reason, stats=stats)
        )
        self._answer_parked(now)
