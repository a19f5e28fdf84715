"""The laws of connector/transfers.py under random events: one P rank, two D, a network that drops and repeats."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.legs import Report, Send, StartRead, StopRead
from connector.loads import Loads
from connector.producer import Producer
from connector.side_channel import Answer, Claimed, Done, Hello, Renewed, Request, TransferMessage, Verified, Verify
from connector.step import Expect, StepMeta
from connector.transfers import Outcome
from tests.connector.simulated import (
    D_BLOCKS,
    P_BLOCKS,
    PAIR,
    SETTINGS,
    Consumer,
    Prefill,
    Reading,
    descriptors_of,
    load_of,
    region,
)


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.count = 0
        self.memory = [0] * P_BLOCKS
        self.free = list(range(P_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.tickets: dict[str, Prefill] = {}
        """Of every prefill that was written; the newest last."""
        self.freed: list[str] = []
        self.producer = Producer(
            epoch="p-1",
            rank=0,
            tp_size=1,
            fingerprint="a=1",
            regions=(region(P_BLOCKS),),
            lease_s=SETTINGS.kv_lease_s,
            hold_s=SETTINGS.kv_hold_s,
            transport_at=lambda: ("p:1", 0),
        )
        self.consumers = [
            Consumer(
                name,
                Loads(
                    SETTINGS,
                    hello=Hello(epoch="", consumer=name, rank=0, tp_size=1, fingerprint="a=1"),
                    regions=[region(D_BLOCKS)],
                ),
            )
            for name in ("d-1", "d-2")
        ]

    # P's engine

    @rule(num_blocks=st.integers(1, 3))
    def begin_prefill(self, num_blocks: int) -> None:
        if len(self.free) < num_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        blocks = [self.free.pop(0) for _ in range(num_blocks)]
        content = [self.count * 10 + i for i in range(num_blocks)]
        self.prefills[name] = Prefill(name, blocks, content)
        self._apply(StepMeta(expected=(Expect(engine_request_id=name, transfer_id=name, pair=PAIR),)))

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["write", "pin", "pin", "abort"]))
    def go_on_with_prefill(self, pick: int, how: str) -> None:
        """Written: the ticket leaves. Pinned: the worker half hears of it."""
        open_ones = [p for p in self.prefills.values() if not (p.is_pinned if how == "pin" else p.is_written)]
        prefill = open_ones[pick % len(open_ones)] if open_ones else None
        if prefill is None:
            return
        if how == "write":
            self._write(prefill)
        elif how == "pin":
            self._pin(prefill)
        else:
            del self.prefills[prefill.name]
            self.free += prefill.blocks
            self._apply(StepMeta(forgotten=(prefill.name,)))

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        pinned = [p for p in self.prefills.values() if p.is_pinned]
        if pinned:
            self._apply(StepMeta(released=(pinned[pick % len(pinned)].name,)))

    # D's engines

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99), hit=st.booleans())
    def load(self, who: int, pick: int, hit: bool) -> None:
        """Of any ticket that ever left: its blocks may be freed, and D may have loaded it before."""
        d = self.consumers[who]
        if not self.tickets or len(d.free) < 3:
            return
        prefill = list(self.tickets.values())[-1 - pick % len(self.tickets)]
        if prefill.name in d.blocks_of:
            return
        d.reported.pop(prefill.name, None)
        blocks = [d.free.pop(0) for _ in prefill.blocks]
        d.blocks_of[prefill.name] = blocks
        first = 1 if hit and len(blocks) > 1 else 0
        for block, value in zip(blocks[:first], prefill.content, strict=False):
            d.memory[block] = value
        d.loads.start(load_of(prefill, blocks, first), self.now)
        self._settle()

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99))
    def cancel(self, who: int, pick: int) -> None:
        d = self.consumers[who]
        if d.blocks_of:
            d.loads.cancel(sorted(d.blocks_of)[pick % len(d.blocks_of)], self.now)
            self._settle()

    @rule(who=st.integers(0, 1), num_blocks=st.integers(1, 3), hit=st.booleans())
    def hand_over(self, who: int, num_blocks: int, hit: bool) -> None:
        """The usual way, up to the reading."""
        self.begin_prefill(num_blocks)
        if (prefill := self.prefills.get(f"r{self.count}")) and not prefill.is_pinned:
            self._pin(prefill)
            self.load(who, 0, hit)
            self.talk(who)

    # The network and time

    @rule(who=st.integers(0, 1))
    def talk(self, who: int) -> None:
        """All messages of one D and their answers arrive."""
        d = self.consumers[who]
        for _ in range(4):
            while d.to_p:
                self._hear(d, d.to_p.pop(0))
            while d.from_p:
                d.loads.on_message("tcp://p:7", d.from_p.pop(0), self.now)
                self._settle()

    @rule(who=st.integers(0, 1), fate=st.sampled_from(["deliver", "deliver", "deliver", "drop", "repeat"]))
    def message_to_p(self, who: int, fate: str) -> None:
        d = self.consumers[who]
        if d.to_p:
            message = d.to_p[0] if fate == "repeat" else d.to_p.pop(0)
            if fate != "drop":
                self._hear(d, message)

    @rule(who=st.integers(0, 1), fate=st.sampled_from(["deliver", "deliver", "deliver", "drop", "repeat"]))
    def message_to_d(self, who: int, fate: str) -> None:
        d = self.consumers[who]
        if d.from_p:
            answer = d.from_p[0] if fate == "repeat" else d.from_p.pop(0)
            if fate != "drop":
                d.loads.on_message("tcp://p:7", answer, self.now)
                self._settle()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._settle()

    # D's transports: one reading at a time

    @rule(who=st.integers(0, 1))
    def copy(self, who: int) -> None:
        d = self.consumers[who]
        if not (reading := next(iter(d.readings), None)):
            return
        if reading.pairs:
            local, remote = reading.pairs.pop(0)
            d.memory[local] = self.memory[remote]
        if not reading.is_broken and (reading.stop or not reading.pairs):
            d.readings.pop(0)
            end = d.loads.drained if reading.stop else d.loads.read
            end(reading.leg_id, self.now)
        self._settle()

    @rule(who=st.integers(0, 1))
    def read_all(self, who: int) -> None:
        for _ in range(4):
            self.copy(who)
            self.talk(who)

    @rule(who=st.integers(0, 1))
    def break_read(self, who: int) -> None:
        d = self.consumers[who]
        if d.readings and not d.readings[0].is_broken:
            d.readings[0].is_broken = True
            d.loads.broken(d.readings[0].leg_id, "status -1", self.now)
            self._settle()

    @rule(who=st.integers(0, 1))
    def fence(self, who: int) -> None:
        d = self.consumers[who]
        if d.readings and d.readings[0].is_broken:
            d.loads.fenced(d.readings.pop(0).leg_id, self.now)
            self._settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        owned = [block for p in self.prefills.values() for block in p.blocks] + self.free
        assert sorted(owned) == list(range(P_BLOCKS))
        for d in self.consumers:
            owned = [block for blocks in d.blocks_of.values() for block in blocks] + d.free
            assert sorted(owned) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        for prefill in [p for p in self.prefills.values() if not p.is_pinned]:
            self._pin(prefill)
        for _ in range(400):
            self.now += 0.5
            for who in range(len(self.consumers)):
                self.talk(who)
                self.fence(who)
                self.copy(who)
            self._settle()
            if not self.prefills and not any(d.blocks_of for d in self.consumers):
                break
        assert not self.prefills
        assert len(self.freed) == len(set(self.freed))
        assert all(not d.blocks_of and not d.readings for d in self.consumers)

    def _pin(self, prefill: Prefill) -> None:
        self._write(prefill)
        prefill.is_pinned = True
        self._apply(StepMeta(pinned=(prefill.name,)))

    def _write(self, prefill: Prefill) -> None:
        for block, value in zip(prefill.blocks, prefill.content, strict=True):
            self.memory[block] = value
        prefill.is_written = True
        self.tickets[prefill.name] = prefill

    def _apply(self, meta: StepMeta) -> None:
        self.producer.apply(meta, self.now)
        self._settle()

    def _hear(self, d: Consumer, message: Request) -> None:
        """P gets a message."""
        prefill = self.prefills.get(message.transfer_id) if isinstance(message, TransferMessage) else None

        def reply(answer: Answer) -> None:
            d.from_p.append(answer)
            if prefill and isinstance(answer, Claimed | Verified | Renewed):
                prefill.heard_of(d.name, self.now, claims=isinstance(answer, Claimed))

        if prefill and (isinstance(message, Done) or (isinstance(message, Verify) and message.is_last)):
            prefill.contact.pop(d.name, None)
        assert isinstance(message, Request)
        self.producer.on_message(message, reply, self.now)
        self._settle()

    def _settle(self) -> None:
        self.producer.tick(self.now)
        for pin in self.producer.take_freed():
            prefill = self.prefills.pop(pin.engine_request_id)  # KeyError: freed twice, or never pinned
            assert prefill.is_pinned
            readers = prefill.readers(self.now)
            assert not readers, f"freed ({pin.cause}) under {readers}"
            self.freed.append(prefill.name)
            self.free += prefill.blocks
            for block in prefill.blocks:
                self.memory[block] = -1  # anybody's now
        for d in self.consumers:
            d.loads.tick(self.now)
            for action in d.loads.take_actions():
                if isinstance(action, Send):
                    d.to_p.append(action.message)
                elif isinstance(action, StartRead):
                    d.readings.append(Reading(action.leg_id, descriptors_of(action.runs)))
                elif isinstance(action, StopRead):
                    for reading in d.readings:
                        reading.stop = reading.stop or reading.leg_id == action.leg_id
                else:
                    self._reported(d, action)

    def _reported(self, d: Consumer, report: Report) -> None:
        name = report.load.engine_request_id
        assert name not in d.reported
        blocks = d.blocks_of.pop(name)
        writing = {local for reading in d.readings for local, _ in reading.pairs}
        assert not writing & set(blocks), "reported while its blocks may be written"
        d.reported[name] = report.outcome
        if report.outcome is Outcome.OK:
            number = int(name.removeprefix("r"))
            assert [d.memory[block] for block in blocks] == [number * 10 + i for i in range(len(blocks))]
        d.free += blocks


Transfers.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
TestTransfers = Transfers.TestCase
