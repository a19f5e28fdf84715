"""Pull's laws under random events where P has more ranks than D: several legs and spares, a network that loses."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connector.layout import KvRegion
from connector.legs import Report, Send, StartRead, StopRead
from connector.loads import Loads
from connector.producer import Producer
from connector.side_channel import Answer, Hello, Request
from connector.step import Expect, Load, StepMeta
from connector.tp_plan import heads_of
from connector.transfers import Outcome
from pdq.wire.types import KvTicket, pack_ids
from tests.connector.simulated import D_BLOCKS, P_BLOCKS, PAIR, SETTINGS

SHAPES = [(2, 1, 2), (2, 1, 1), (4, 1, 2), (4, 2, 4), (4, 2, 2), (4, 2, 1)]
BASE = 1000


def content(number: int, index: int, head: int) -> int:
    return number * 100 + index * 10 + head


@dataclass
class Reading:
    leg_id: int
    source: int
    pairs: list[tuple[int, int]]
    """(address at D, address at P) still to be copied."""
    stop: bool = False
    is_broken: bool = False


class Shard:
    """Memory of one rank: one byte a head."""

    def __init__(self, rank: int, tp_size: int, num_kv_heads: int, num_blocks: int) -> None:
        self.first_head, self.num_heads = heads_of(rank, tp_size, num_kv_heads)
        self.region = KvRegion(
            layer="all",
            base_address=BASE,
            block_stride_bytes=self.num_heads,
            num_blocks=num_blocks,
            num_heads=self.num_heads,
            first_head=self.first_head,
        )
        self.memory: dict[int, int] = {}

    def addresses(self, block: int) -> list[int]:
        return [BASE + block * self.num_heads + cell for cell in range(self.num_heads)]

    def share(self, number: int, index: int) -> list[int]:
        return [content(number, index, self.first_head + cell) for cell in range(self.num_heads)]


class PRank(Shard):
    producer: Producer


class DRank(Shard):
    def __init__(self, rank: int, tp_size: int, num_kv_heads: int) -> None:
        super().__init__(rank, tp_size, num_kv_heads, D_BLOCKS)
        hello = Hello(
            epoch="", consumer="d-1", rank=rank, tp_size=tp_size, fingerprint="a=1", num_kv_heads=num_kv_heads
        )
        self.loads = Loads(SETTINGS, hello=hello, regions=[self.region])
        self.readings: list[Reading] = []


@dataclass
class Prefill:
    number: int
    blocks: list[int]
    is_pinned: bool = False
    freed_by: set[int] = field(default_factory=set)


@dataclass
class Loading:
    number: int
    blocks: list[int]
    ended: dict[int, Outcome] = field(default_factory=dict)
    """By D's rank."""


class UnequalPull(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int, int]) -> None:
        self.prefill_tp, self.decode_tp, self.num_kv_heads = shape
        self.now, self.count = 100.0, 0
        self.p_free, self.d_free = list(range(P_BLOCKS)), list(range(D_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.loading: dict[str, Loading] = {}
        self.to_p: list[tuple[int, str, Request]] = []
        self.to_d: list[tuple[int, str, Answer]] = []
        """(D's rank, P's rank's endpoint, what)"""
        self.p = [PRank(rank, self.prefill_tp, self.num_kv_heads, P_BLOCKS) for rank in range(self.prefill_tp)]
        self.d = [DRank(rank, self.decode_tp, self.num_kv_heads) for rank in range(self.decode_tp)]
        for rank, p in enumerate(self.p):
            p.producer = Producer(
                epoch="p-1",
                rank=rank,
                tp_size=self.prefill_tp,
                fingerprint="a=1",
                regions=(p.region,),
                lease_s=SETTINGS.kv_lease_s,
                hold_s=SETTINGS.kv_hold_s,
                transport_at=lambda rank=rank: (f"p:{rank}", 0),
                num_kv_heads=self.num_kv_heads,
            )

    @rule(num_blocks=st.integers(1, 3))
    def prefill(self, num_blocks: int) -> None:
        """Computed on all ranks, which hear of its end one by one."""
        if len(self.p_free) < num_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        prefill = self.prefills[name] = Prefill(self.count, [self.p_free.pop(0) for _ in range(num_blocks)])
        for p in self.p:
            p.producer.apply(
                StepMeta(expected=(Expect(engine_request_id=name, transfer_id=name, pair=PAIR),)), self.now
            )
            for index, block in enumerate(prefill.blocks):
                p.memory |= dict(zip(p.addresses(block), p.share(self.count, index), strict=True))

    @rule(pick=st.integers(0, 9), how=st.sampled_from(["pin", "pin", "pin", "release"]))
    def pin_or_release(self, pick: int, how: str) -> None:
        found = [name for name, p in self.prefills.items() if p.is_pinned == (how == "release")]
        if found:
            name = found[pick % len(found)]
            self.prefills[name].is_pinned = True
            meta = StepMeta(pinned=(name,)) if how == "pin" else StepMeta(released=(name,))
            for p in self.p:
                p.producer.apply(meta, self.now)
            self.settle()

    @rule(pick=st.integers(0, 9))
    def load(self, pick: int) -> None:
        names = [name for name in self.prefills if name not in self.loading]
        if not names or len(self.d_free) < 3:
            return
        name = names[pick % len(names)]
        prefill = self.prefills[name]
        blocks = [self.d_free.pop(0) for _ in prefill.blocks]
        self.loading[name] = Loading(prefill.number, blocks)
        ticket = KvTicket(
            transfer_id=name,
            pair=PAIR,
            engine_id="p",
            epoch="p-1",
            host="p",
            port=7,
            tp_size=self.prefill_tp,
            block_size=16,
            num_tokens=16 * len(blocks),
            block_ids=pack_ids(prefill.blocks),
        )
        for d in self.d:
            d.loads.start(Load(engine_request_id=name, ticket=ticket, block_ids=tuple(blocks), first_block=0), self.now)
        self.settle()

    @rule(num_blocks=st.integers(1, 3))
    def hand_over(self, num_blocks: int) -> None:
        """The usual way, up to the reading."""
        self.prefill(num_blocks)
        self.pin_or_release(0, "pin")
        self.load(0)
        self.talk()

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        if self.loading:
            name = sorted(self.loading)[pick % len(self.loading)]
            for d in self.d:
                d.loads.cancel(name, self.now)
            self.settle()

    @rule()
    def talk(self) -> None:
        for _ in range(4):
            while self.to_p:
                self.p_hears(self.to_p.pop(0))
            while self.to_d:
                self.d_hears(self.to_d.pop(0))

    @rule(is_to_p=st.booleans(), fate=st.sampled_from(["deliver", "deliver", "late", "drop", "repeat"]))
    def message(self, is_to_p: bool, fate: str) -> None:
        queue, hear = (self.to_p, self.p_hears) if is_to_p else (self.to_d, self.d_hears)
        if queue:
            message = queue[0] if fate == "repeat" else queue.pop(0)
            if fate == "late":
                queue.append(message)  # type: ignore[arg-type]
            elif fate != "drop":
                hear(message)  # type: ignore[operator]

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(who=st.integers(0, 1))
    def copy(self, who: int) -> None:
        """One byte of the reading under way."""
        d = self.d[who % self.decode_tp]
        if not (reading := next(iter(d.readings), None)):
            return
        if reading.pairs:
            local, remote = reading.pairs.pop(0)
            d.memory[local] = self.p[reading.source].memory[remote]
        if reading.is_broken:
            return
        if reading.stop:
            d.readings.pop(0)
            d.loads.drained(reading.leg_id, self.now)
        elif not reading.pairs:
            d.readings.pop(0)
            d.loads.read(reading.leg_id, self.now)
        self.settle()

    @rule(who=st.integers(0, 1))
    def break_or_fence(self, who: int) -> None:
        d = self.d[who % self.decode_tp]
        if not d.readings:
            return
        if d.readings[0].is_broken:
            d.loads.fenced(d.readings.pop(0).leg_id, self.now)
        else:
            d.readings[0].is_broken = True
            d.loads.broken(d.readings[0].leg_id, "status -1", self.now)
        self.settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        assert sorted([b for p in self.prefills.values() for b in p.blocks] + self.p_free) == list(range(P_BLOCKS))
        assert sorted([b for x in self.loading.values() for b in x.blocks] + self.d_free) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        if not hasattr(self, "p"):
            return
        while any(not prefill.is_pinned for prefill in self.prefills.values()):
            self.pin_or_release(0, "pin")
        for _ in range(400):
            self.now += 0.5
            self.talk()
            for who, d in enumerate(self.d):
                if d.readings and d.readings[0].is_broken:
                    self.break_or_fence(who)
                self.copy(who)
            self.settle()
            if not self.prefills and not self.loading:
                break
        assert not self.prefills
        assert not self.loading
        assert all(not d.readings for d in self.d)

    def p_hears(self, sent: tuple[int, str, Request]) -> None:
        who, endpoint, message = sent
        rank = int(endpoint.rpartition(":")[2]) - 7
        self.p[rank].producer.on_message(
            message,
            lambda answer: self.to_d.append((who, endpoint, answer)),
            self.now,  # type: ignore[arg-type]
        )
        self.settle()

    def d_hears(self, sent: tuple[int, str, Answer]) -> None:
        who, endpoint, answer = sent
        self.d[who].loads.on_message(endpoint, answer, self.now)
        self.settle()

    def settle(self) -> None:
        for rank, p in enumerate(self.p):
            p.producer.tick(self.now)
            for pin in p.producer.take_freed():
                prefill = self.prefills[pin.engine_request_id]
                assert rank not in prefill.freed_by, "freed twice"
                prefill.freed_by.add(rank)
        for name, prefill in list(self.prefills.items()):
            if len(prefill.freed_by) == self.prefill_tp:
                del self.prefills[name]
                self.p_free += prefill.blocks
                for p in self.p:  # anybody's now
                    p.memory.update({address: -1 for block in prefill.blocks for address in p.addresses(block)})
        for who, d in enumerate(self.d):
            d.loads.tick(self.now)
            for action in d.loads.take_actions():
                if isinstance(action, Send):
                    self.to_p.append((who, action.endpoint, action.message))
                elif isinstance(action, StartRead):
                    source = int(action.address.partition(":")[2])
                    runs = zip(action.runs.local, action.runs.remote, action.runs.lengths, strict=True)
                    pairs = [(local + i, remote + i) for local, remote, length in runs for i in range(length)]
                    d.readings.append(Reading(action.leg_id, source, pairs))
                elif isinstance(action, StopRead):
                    for reading in d.readings:
                        reading.stop = reading.stop or reading.leg_id == action.leg_id
                else:
                    self._reported(who, action)

    def _reported(self, who: int, report: Report) -> None:
        name, d = report.load.engine_request_id, self.d[who]
        loading = self.loading[name]
        assert who not in loading.ended, "reported twice"
        loading.ended[who] = report.outcome
        mine = {address for block in loading.blocks for address in d.addresses(block)}
        assert not mine & {local for reading in d.readings for local, _ in reading.pairs}, "reported under a read"
        if report.outcome is Outcome.OK:
            for index, block in enumerate(loading.blocks):
                assert [d.memory[address] for address in d.addresses(block)] == d.share(loading.number, index)
        if len(loading.ended) == self.decode_tp:
            del self.loading[name]
            self.d_free += loading.blocks


UnequalPull.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
TestUnequalPull = UnequalPull.TestCase
