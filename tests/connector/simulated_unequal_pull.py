"""What pull's random-event test with unequal TP plays on: memory and cores of all ranks, and a network."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.layout import KvRegion
from connector.legs import Report, Send, StartRead, StopRead
from connector.loads import Loads
from connector.producer import Producer
from connector.side_channel import Answer, Hello, Request
from connector.tp_plan import heads_of
from connector.transfers import Outcome
from tests.connector.simulated import D_BLOCKS, P_BLOCKS, SETTINGS

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


class UnequalPullSimulation:
    """All cores and what joins them. `settle` after every event."""

    def set_up(self, prefill_tp: int, decode_tp: int, num_kv_heads: int) -> None:
        self.prefill_tp, self.decode_tp, self.num_kv_heads = prefill_tp, decode_tp, num_kv_heads
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
