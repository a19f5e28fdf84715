"""A numbered link under random events: frames and acks that are lost, repeated and reordered, connections that are
reset, a receiver that starts anew, a sender that gives up.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdq.wire.link import FrameReceiver, FrameSender, LinkOverflow
from tests.event_sequences import many, some

MAX_RETAINED = 6


class LossyChannel(RuleBasedStateMachine):
    """Frame n carries the number n. At the end the channel is fair, and all must have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.link = self.new_sender(1)
        self.receiver = FrameReceiver(ack_interval_s=0.1)
        self.frames: list[tuple[int, int, int]] = []
        """On their way: (number, the sender's oldest then, payload)."""
        self.acks: list[int] = []
        self.pushed = 0
        self.given_up: set[int] = set()
        self.delivered: list[int] = []
        """To this receiver."""
        self.first_wanted = 1
        """What this receiver may begin with, at the latest."""
        self.ever_delivered: set[int] = set()

    def new_sender(self, first: int) -> FrameSender[int]:
        return FrameSender(max_retained=MAX_RETAINED, resend_s=1.0, first=first)

    @rule(count=st.integers(1, 4))
    def push(self, count: int) -> None:
        for _ in range(count):
            if self.link.num_retained == MAX_RETAINED:
                with pytest.raises(LinkOverflow):
                    self.link.retain(self.pushed + 1, self.now)
                return
            self.pushed += 1
            assert self.link.retain(self.pushed, self.now) == self.pushed

    @rule(room=st.integers(1, 6))
    def flush(self, room: int) -> None:
        for frame, payload in self.link.unsent():
            if room == 0:
                return
            room -= 1
            self.frames.append((frame, self.link.oldest, payload))
            self.link.mark_sent(frame)

    fates = st.sampled_from(["arrives", "arrives", "arrives", "arrives and comes again", "is lost"])

    @precondition(lambda self: self.frames)
    @rule(pick=st.integers(0, 9), fate=fates)
    def frame(self, pick: int, fate: str) -> None:
        """The oldest one under way, or one that overtakes it."""
        index = pick % len(self.frames) if pick > 5 else 0
        frame, oldest, payload = self.frames[index] if "again" in fate else self.frames.pop(index)
        if "arrives" in fate:
            self.arrive(frame, oldest, payload)

    def arrive(self, frame: int, oldest: int, payload: int) -> None:
        if self.receiver.accept(frame, oldest=oldest):
            self.delivered.append(payload)
            self.ever_delivered.add(payload)

    @rule()
    def acknowledge(self) -> None:
        ack = self.receiver.ack_due(self.now)
        if ack is not None:
            self.acks.append(ack)

    @precondition(lambda self: self.acks)
    @rule(pick=st.integers(0, 9), fate=fates)
    def ack(self, pick: int, fate: str) -> None:
        index = pick % len(self.acks) if pick > 5 else 0
        ack = self.acks[index] if "again" in fate else self.acks.pop(index)
        if "arrives" in fate:
            self.link.on_ack(ack, self.now)

    @rule()
    def all_goes_well(self) -> None:
        self.flush(MAX_RETAINED)
        while self.frames:
            self.arrive(*self.frames.pop(0))
        self.acknowledge()
        while self.acks:
            self.link.on_ack(self.acks.pop(0), self.now)

    # Rarely, or no sequence would get far

    @rule(event=st.sampled_from([None] * 12 + ["loses", "delays", "receiver", "new link"]))
    def disturb(self, event: str | None) -> None:
        match event:
            case "loses" | "delays":
                self.reset(loses=event == "loses")
            case "receiver":
                self.receiver_starts_anew()
            case "new link":
                self.sender_gives_up()

    def reset(self, *, loses: bool) -> None:
        """What was under way is lost, or comes late."""
        if loses:
            self.frames.clear()
            self.acks.clear()
        self.link.on_reset(self.now)

    def receiver_starts_anew(self) -> None:
        """Another process at the same address: it never sees what the old connection carried."""
        self.reset(loses=True)
        self.receiver = FrameReceiver(ack_interval_s=0.1)
        self.delivered = []
        self.first_wanted = self.link.oldest

    def sender_gives_up(self) -> None:
        """Whoever sends here drops its link with what it keeps; numbering goes on."""
        first = self.link.next_frame
        self.given_up.update(range(self.link.oldest, first))
        self.frames.clear()
        self.acks.clear()
        self.link = self.new_sender(first)

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.link.on_tick(self.now)

    @invariant()
    def each_arrives_once_and_in_order(self) -> None:
        assert self.delivered == sorted(set(self.delivered))
        missed = set(range(self.first_wanted, max(self.delivered, default=0))) - set(self.delivered)
        assert missed <= self.given_up

    @invariant()
    def nothing_is_forgotten_before_it_arrived(self) -> None:
        assert set(range(1, self.link.oldest)) <= self.ever_delivered | self.given_up
        assert self.link.next_frame == self.pushed + 1

    def teardown(self) -> None:
        for _ in range(20):
            self.now += 5.0
            self.link.on_tick(self.now)
            self.flush(MAX_RETAINED)
            for frame in self.frames:
                self.arrive(*frame)
            self.frames.clear()
            ack = self.receiver.ack_due(self.now)
            if ack is not None:
                self.link.on_ack(ack, self.now)
        assert self.ever_delivered | self.given_up == set(range(1, self.pushed + 1))
        assert self.link.num_retained == 0


TestLossyChannel = some(LossyChannel, 200, num_steps=60)
test_ten_thousand_sequences = many(LossyChannel, num_steps=60)
