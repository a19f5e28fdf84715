"""D's side of all transfers of one rank: from `start` to one report per load, whatever P does. Pure.

A load has one leg per P rank that this rank reads from (`tp_plan`); other P ranks with the same heads are spares: kept
while it runs, told how it ended. It is reported when no leg can write its blocks any more:
loaded when all legs were verified, else failed or cancelled. The first cause wins and stops the other legs.
What is to be done comes out of `take_actions`; what came of it goes into the methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from connector.asks import Asks
from connector.greetings import Greetings, Peer
from connector.layout import KvRegion, LayoutError, plan_runs
from connector.legs import (
    Action,
    Leg,
    Report,
    Running,
    Send,
    StartRead,
    StopRead,
    claim_of,
    done_of,
    peer_of,
    renew_of,
    verify_of,
)
from connector.presence import Presence
from connector.settings import ConnectorSettings
from connector.side_channel import Abort, Answer, Claimed, DoneAck, Gone, Hello, Meta, Reject, Renewed, Verified
from connector.step import Load
from connector.tp_plan import Servers, servers_of
from connector.transfers import LEG_TABLE, USED_TWICE, LegEvent, LegState, Outcome, TransferKey, next_state
from pdq.wire.types import TransferStats, unpack_ids


class Loads:
    """`now` is in seconds of a monotonic clock. Answers that nobody waits for are counted and ignored."""

    def __init__(self, settings: ConnectorSettings, *, hello: Hello, regions: Sequence[KvRegion]) -> None:
        """`hello`: who this rank is; its epoch is filled in per peer."""
        every_s, tries = settings.kv_answer_s, settings.kv_answer_tries
        self._settings = settings
        self._hello = hello
        self._regions = regions
        self._greetings = Greetings(hello=hello, regions=regions, every_s=every_s, tries=tries)
        self._presence = Presence()
        self._asks: Asks[int] = Asks(every_s=every_s, tries=tries)
        self._dones: Asks[tuple[str, TransferKey]] = Asks(every_s=every_s, tries=tries)
        self._ids = itertools.count(1)
        self._running: dict[str, Running] = {}
        self._legs: dict[int, Leg] = {}
        self._leg_of: dict[tuple[str, TransferKey], Leg] = {}
        self._actions: list[Action] = []
        self.num_ignored = 0

    def __len__(self) -> int:
        return len(self._running)

    def start(self, load: Load, now: float) -> None:
        """The id is reported once, whatever happens. A repeated id is ignored."""
        if load.engine_request_id in self._running:
            self.num_ignored += 1
            return
        ticket = load.ticket
        running = Running(
            load=load,
            key=TransferKey(transfer_id=ticket.transfer_id, pair=ticket.pair),
            started_at=now,
            deadline=now + self._settings.kv_wait_s,
            renew_at=now + self._settings.kv_lease_s / 3,
        )
        self._running[load.engine_request_id] = running
        hello, servers = self._hello, Servers(sources=())
        try:
            servers = servers_of(hello.rank, hello.tp_size, ticket.tp_size, hello.num_kv_heads, ticket.transfer_id)
        except LayoutError as exc:
            self._decide(running, Outcome.FAILED, str(exc))
        if any((peer_of(ticket, rank).endpoint, running.key) in self._leg_of for rank in servers.sources):
            self._decide(running, Outcome.FAILED, USED_TWICE)
            servers = Servers(sources=())  # so P hears nothing: it would take it for the other's word
        running.spares = [peer_of(ticket, rank) for rank in servers.spares]
        for rank in servers.sources:
            peer = peer_of(ticket, rank)
            leg = Leg(leg_id=next(self._ids), running=running, peer=peer)
            running.legs.append(leg)
            self._legs[leg.leg_id] = leg
            self._leg_of[peer.endpoint, running.key] = leg
        if load.failed is not None:
            self._decide(running, Outcome.FAILED, load.failed)
        for leg in running.legs:
            if leg.state is LegState.GREETING:
                self._meet(leg, now)
        self._finish_if_ended(running, now)

    def cancel(self, engine_request_id: str, now: float) -> None:
        """Reported as soon as nothing writes its blocks any more. Ids that were reported already are ignored."""
        running = self._running.get(engine_request_id)
        if running is not None:
            self._decide(running, Outcome.CANCELLED, "cancelled")
            self._finish_if_ended(running, now)

    def on_message(self, endpoint: str, answer: Answer, now: float) -> None:
        if isinstance(answer, Meta | Reject):
            peer = self._greetings.answered(endpoint, answer)
            if peer is not None:
                if isinstance(answer, Meta):
                    self._presence.heard(peer, now, answer.transport_address)
                self._greeted(peer, now)
            return
        if isinstance(answer, DoneAck):
            self._dones.answered((endpoint, answer.key))
            return
        leg = self._leg_of.get((endpoint, answer.key))
        if leg is not None:
            address = answer.transport_address if isinstance(answer, Claimed | Verified) else ""
            self._presence.heard(leg.peer, now, address)
        if leg is None:
            self.num_ignored += not isinstance(answer, Gone | Renewed)
        elif isinstance(answer, Gone | Abort):
            leg.is_gone = True
            self._refuse(leg, f"P says gone: {answer.reason}", now)
        elif isinstance(answer, Claimed) and leg.state is LegState.CLAIMING:
            self._asks.answered(leg.leg_id)
            self._begin(leg, answer.transport_address, now)
        elif isinstance(answer, Verified) and leg.state is LegState.VERIFYING and answer.load in (None, leg.leg_id):
            leg.is_done_told = len(leg.running.legs) == 1
            if answer.transport_address == leg.address:
                self._fire(leg, LegEvent.VERIFIED, now)
            else:
                self._refuse(leg, f"P's transport was replaced: {leg.address}, now {answer.transport_address}", now)

    # What the reading thread says of a StartRead.

    def read(self, leg_id: int, now: float) -> None:
        leg = self._legs[leg_id]
        self._fire(leg, LegEvent.READ, now)
        if leg.state is LegState.VERIFYING:
            self._asks.put(leg_id, leg.peer.endpoint, verify_of(leg, self._hello), now)

    def drained(self, leg_id: int, now: float) -> None:
        self._fire(self._legs[leg_id], LegEvent.DRAINED, now)

    def broken(self, leg_id: int, cause: str, now: float, *, is_peer_lost: bool = False) -> None:
        """`is_peer_lost`: the peer is dead or stands still, so that no other read of it is worth a try."""
        leg = self._legs[leg_id]
        self._presence.lost(leg.peer)
        self._decide(leg.running, Outcome.FAILED, f"read failed: {cause}", but=leg)
        self._fire(leg, LegEvent.BROKEN, now)
        if is_peer_lost:
            for other in self._legs.values():
                if other.peer == leg.peer and other.state is LegState.READING:
                    self._decide(other.running, Outcome.FAILED, f"read of another request failed: {cause}")

    def fenced(self, leg_id: int, now: float) -> None:
        self._fire(self._legs[leg_id], LegEvent.FENCED, now)

    # Time.

    def tick(self, now: float) -> None:
        """Deadlines, renewals and repeats that are due."""
        for running in list(self._running.values()):
            if running.outcome is None and running.deadline <= now:
                waited_s = self._settings.kv_wait_s
                self._decide(running, Outcome.FAILED, f"not read within {waited_s:g} s")
                self._finish_if_ended(running, now)
            elif running.outcome is None and running.renew_at <= now:
                running.renew_at = now + self._settings.kv_lease_s / 3
                self._renew(running)
        greetings, silent_peers = self._greetings.due(now)
        asks, silent_legs = self._asks.due(now)
        dones, _ = self._dones.due(now)  # not acknowledged: P's lease ends the pin
        self._actions += [Send(endpoint=e, message=m) for e, m in (*greetings, *asks, *dones)]
        silent = [self._legs[leg_id] for leg_id in silent_legs]
        if silent_peers:
            silent += [leg for leg in self._legs.values() if leg.peer in silent_peers]
        for leg in silent:
            if leg.state in (LegState.GREETING, LegState.CLAIMING, LegState.VERIFYING):
                self._refuse(leg, f"P does not answer at {leg.peer.endpoint}", now)

    def next_at(self) -> float | None:
        """When `tick` has something to do."""
        times = [self._greetings.next_at(), self._asks.next_at(), self._dones.next_at()]
        times += [min(running.deadline, running.renew_at) for running in self._running.values()]
        return min((at for at in times if at is not None), default=None)

    def take_ignored(self) -> int:
        """Answers that nobody waited for, since the last call."""
        num_ignored, self.num_ignored = self.num_ignored, 0
        return num_ignored

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _meet(self, leg: Leg, now: float) -> None:
        """Goes on when the peer is known: reads at once, or claims first; refuses one that doesn't fit; else greets."""
        if refusal := self._greetings.refusal(leg.peer):
            self._refuse(leg, refusal, now)
        elif self._greetings.meta(leg.peer) is None:
            self._greetings.greet(leg.peer, now)
        else:
            self._fire(leg, LegEvent.MET, now)
            address = self._presence.fresh_address(leg.peer, now)
            if address is not None and self._is_small(leg):
                self._begin(leg, address, now)
            else:
                self._asks.put(leg.leg_id, leg.peer.endpoint, claim_of(leg, self._hello), now)

    def _is_small(self, leg: Leg) -> bool:
        """So little that its read may turn out to be for nothing: unclaimed blocks may be released meanwhile."""
        num_blocks = len(leg.running.load.block_ids) - leg.running.load.first_block
        block_bytes = sum(region.size_bytes for region in self._regions)
        return num_blocks * block_bytes <= self._settings.kv_direct_bytes

    def _greeted(self, peer: Peer, now: float) -> None:
        for leg in [leg for leg in self._legs.values() if leg.peer == peer and leg.state is LegState.GREETING]:
            if leg.state is LegState.GREETING:
                self._meet(leg, now)

    def _begin(self, leg: Leg, address: str, now: float) -> None:
        """Granted by CLAIMED, or by the ticket itself."""
        load, meta = leg.running.load, self._greetings.meta(leg.peer)
        try:
            if meta is None:
                raise LayoutError("the peer's regions were forgotten")
            remote_ids = unpack_ids(load.ticket.block_ids)
            local_ids = load.block_ids[: len(remote_ids)]
            runs = plan_runs(self._regions, meta.regions, local_ids[load.first_block :], remote_ids[load.first_block :])
        except LayoutError as exc:
            self._refuse(leg, str(exc), now)
            return
        leg.address, leg.num_bytes, leg.num_descriptors = address, runs.num_bytes, len(runs)
        self._fire(leg, LegEvent.GRANTED, now)
        self._actions.append(StartRead(leg_id=leg.leg_id, address=address, runs=runs))

    def _renew(self, running: Running) -> None:
        kept = (LegState.GREETING, LegState.CLAIMING, LegState.READING, LegState.VERIFYING)
        for peer in (*(leg.peer for leg in running.legs if leg.state in kept), *running.spares):
            self._actions.append(Send(endpoint=peer.endpoint, message=renew_of(running, peer, self._hello)))

    def _refuse(self, leg: Leg, reason: str, now: float) -> None:
        if leg.state in (LegState.DRAINING, LegState.FENCING, LegState.ENDED):
            return
        running = leg.running
        self._decide(running, Outcome.FAILED, reason)
        self._finish_if_ended(running, now)

    def _decide(self, running: Running, outcome: Outcome, reason: str, but: Leg | None = None) -> None:
        """The first decision stays. Stops all legs; those that read go on until their call has ended."""
        if running.outcome is not None:
            return
        running.outcome, running.reason = outcome, reason
        for leg in running.legs:
            if leg is but or leg.state is LegState.ENDED:
                continue
            was_reading = leg.state is LegState.READING
            leg.state = next_state(LEG_TABLE, leg.state, LegEvent.STOP)
            self._asks.answered(leg.leg_id)
            if was_reading:
                self._actions.append(StopRead(leg_id=leg.leg_id))

    def _fire(self, leg: Leg, event: LegEvent, now: float) -> None:
        leg.state = next_state(LEG_TABLE, leg.state, event)
        if leg.state is LegState.ENDED:
            self._asks.answered(leg.leg_id)
            self._finish_if_ended(leg.running, now)

    def _finish_if_ended(self, running: Running, now: float) -> None:
        if running.load.engine_request_id not in self._running:
            return
        if any(leg.state is not LegState.ENDED for leg in running.legs):
            return
        outcome = running.outcome or Outcome.OK
        del self._running[running.load.engine_request_id]
        to_tell = running.spares
        for leg in running.legs:
            del self._legs[leg.leg_id]
            self._leg_of.pop((leg.peer.endpoint, running.key), None)
            if not leg.is_gone and not leg.is_done_told:
                to_tell.append(leg.peer)
        for peer in to_tell:
            done = done_of(running, peer, self._hello, outcome)
            self._dones.put((peer.endpoint, running.key), peer.endpoint, done, now)
        stats = TransferStats(
            num_bytes=sum(leg.num_bytes for leg in running.legs),
            num_descriptors=sum(leg.num_descriptors for leg in running.legs),
            seconds=now - running.started_at,
        )
        self._actions.append(Report(load=running.load, outcome=outcome, reason=running.reason, stats=stats))
