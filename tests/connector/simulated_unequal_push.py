"""What push's random-event test with unequal TP plays on: memory of all ranks, writers, late bytes, a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.layout import KvRegion
from connector.legs import Send
from connector.offers import Offers
from connector.push_legs import FenceTransport, PushReport, ReceiveReport, StartWrite, StopWrites
from connector.pushes import Pushes
from connector.receptions import Receptions
from connector.side_channel import Answer, Cancel, Hello, Meta, RecvReady, Request
from connector.step import Receive
from connector.tp_plan import heads_of
from connector.transfers import Outcome
from pdq.wire.types import KvSource
from tests.connector.simulated_push import D_BLOCKS, P_BLOCKS, SETTINGS

Back = Callable[[str, Answer], None]


@dataclass
class Job:
    action: StartWrite
    target: int
    generation: int
    pairs: list[tuple[int, int]]
    """(P's address, D's address) still to be copied."""


class Shard:
    """Memory of one rank: two layers, one byte a head."""

    def __init__(self, rank: int, tp_size: int, num_kv_heads: int, num_blocks: int, name: str) -> None:
        self.first_head, self.num_heads = heads_of(rank, tp_size, num_kv_heads)
        self.num_blocks = num_blocks
        self.hello = Hello(
            epoch="", consumer=name, rank=rank, tp_size=tp_size, fingerprint="a=1", num_kv_heads=num_kv_heads
        )
        self.regions = [
            KvRegion(
                layer=f"l{layer}",
                base_address=1000 * (1 + layer),
                block_stride_bytes=self.num_heads,
                num_blocks=num_blocks,
                num_heads=self.num_heads,
                first_head=self.first_head,
            )
            for layer in range(2)
        ]
        self.memory: dict[int, int] = {}

    def addresses(self, block: int, layer: int) -> list[int]:
        return [1000 * (1 + layer) + block * self.num_heads + cell for cell in range(self.num_heads)]

    def share(self, number: int, index: int, layer: int) -> list[int]:
        return [number * 1000 + index * 100 + layer * 10 + self.first_head + cell for cell in range(self.num_heads)]

    def all_of(self, blocks: list[int]) -> set[int]:
        return {address for block in blocks for layer in range(2) for address in self.addresses(block, layer)}


class PRank(Shard):
    pushes: Pushes
    jobs: list[Job]


class DRank(Shard):
    receptions: Receptions
    generation = 0
    is_fence_wanted = False
    late: list[tuple[int, int, int]]
    """(generation, value, address) of failed calls."""


@dataclass
class Prefill:
    number: int
    blocks: list[int]
    num_computed: int = 0
    is_left: bool = False
    reported_by: set[int] = field(default_factory=set)


@dataclass
class Receiver:
    number: int
    blocks: list[int]
    ended: dict[int, Outcome] = field(default_factory=dict)
    """By D's rank."""


class UnequalPushSimulation:
    """All cores and what joins them. `settle` after every event."""

    def set_up(self, prefill_tp: int, decode_tp: int, num_kv_heads: int) -> None:
        self.prefill_tp, self.decode_tp = prefill_tp, decode_tp
        self.now, self.count = 100.0, 0
        self.p_free, self.d_free = list(range(P_BLOCKS)), list(range(D_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.receivers: dict[str, Receiver] = {}
        self.seen: set[str] = set()
        self.unheard: list[Receive] = []
        """What D's ranks will hear with its next step."""
        self.network: list[Callable[[], None]] = []
        self.offers = Offers(SETTINGS, consumer="d-1")
        self.source = KvSource(engine_id="p", epoch="p-1", host="p", port=100, tp_size=self.prefill_tp, block_size=16)
        self.p = [PRank(r, self.prefill_tp, num_kv_heads, P_BLOCKS, "p-1") for r in range(self.prefill_tp)]
        self.d = [DRank(r, self.decode_tp, num_kv_heads, D_BLOCKS, "d-1") for r in range(self.decode_tp)]
        for p in self.p:
            p.pushes, p.jobs = Pushes(SETTINGS, hello=p.hello, regions=p.regions), []
        for rank, d in enumerate(self.d):
            d.late = []
            d.receptions = Receptions(
                SETTINGS,
                hello=d.hello,
                transport_at=lambda d=d, rank=rank: (f"{rank}:{d.generation}", d.generation),
            )

    def send(self, action: Send, back: Back) -> None:
        self.network.append(lambda: self.deliver(action.endpoint, action.message, back))

    def deliver(self, endpoint: str, message: Request, back: Back) -> None:
        def reply(answer: Answer) -> None:
            self.network.append(lambda: (back(endpoint, answer), self.settle())[1])

        port = int(endpoint.rpartition(":")[2])
        if isinstance(message, RecvReady):
            self.p[port - 100].pushes.recv_ready(message, reply, self.now)
        elif isinstance(message, Cancel):
            self.p[port - 100].pushes.cancel(message, reply, self.now)
        elif isinstance(message, Hello):
            hello = self.d[port - 200].hello
            reply(
                Meta(
                    epoch="d-1",
                    rank=hello.rank,
                    tp_size=hello.tp_size,
                    regions=tuple(self.d[port - 200].regions),
                    transport_address="",
                    num_kv_heads=hello.num_kv_heads,
                )
            )
        else:
            self.d[port - 200].receptions.on_message(message, reply, self.now)  # type: ignore[arg-type]
        self.settle()

    def break_off(self, p: PRank) -> None:
        """What the call has under way may land later. P fences, so nothing is read any more."""
        job = p.jobs.pop(0)
        self.d[job.target].late += [(job.generation, p.memory[local], remote) for local, remote in job.pairs]
        p.pushes.broken(job.action.job_id, job.action.push_id, "status -1", False, self.now)

    def land(self, rank: int, value: int, remote: int) -> None:
        d = self.d[rank]
        owners = [r.number for r in self.receivers.values() if rank not in r.ended and remote in d.all_of(r.blocks)]
        assert owners == [value // 1000], "a byte landed in blocks that were given back, or of another request"
        d.memory[remote] = value

    def free_p(self, blocks: list[int]) -> None:
        self.p_free += blocks
        for p in self.p:
            p.memory.update(dict.fromkeys(p.all_of(blocks), -1))  # anybody's now

    def settle(self) -> None:
        for action in self.offers.tick(self.now):
            self.send(Send(endpoint=action[0], message=action[1]), self._to_offers)
        for lost in self.offers.take_lost():
            for d in self.d:
                d.receptions.lose(lost, self.now)
        for rank, p in enumerate(self.p):
            p.pushes.tick(self.now)
            for push_action in p.pushes.take_actions():
                if isinstance(push_action, Send):
                    self.send(push_action, lambda e, a, p=p: p.pushes.on_answer(e, a, self.now))  # type: ignore[misc]
                elif isinstance(push_action, StartWrite):
                    target, generation = map(int, push_action.address.split(":"))
                    runs = zip(push_action.runs.local, push_action.runs.remote, push_action.runs.lengths, strict=True)
                    pairs = [(local + i, remote + i) for local, remote, length in runs for i in range(length)]
                    p.jobs.append(Job(push_action, target, generation, pairs))
                elif isinstance(push_action, StopWrites):
                    for job in [job for job in p.jobs[1:] if job.action.push_id == push_action.push_id]:
                        p.jobs.remove(job)
                        p.pushes.dropped(job.action.job_id, job.action.push_id, self.now)
                    self.settle()
                else:
                    self._pushed(rank, push_action)
        for rank, d in enumerate(self.d):
            d.receptions.tick(self.now)
            for action_at_d in d.receptions.take_actions():
                if isinstance(action_at_d, Send):
                    self.send(action_at_d, lambda e, a, d=d: d.receptions.on_answer(e, a, self.now))  # type: ignore[misc]
                elif isinstance(action_at_d, FenceTransport):
                    d.is_fence_wanted = True
                else:
                    self._received(rank, action_at_d)

    def _to_offers(self, endpoint: str, answer: Answer) -> None:
        self.offers.on_message(endpoint, answer, self.now)

    def _pushed(self, rank: int, report: PushReport) -> None:
        prefill, p = self.prefills[report.engine_request_id], self.p[rank]
        assert prefill.is_left
        assert rank not in prefill.reported_by, "reported twice"
        assert not p.all_of(prefill.blocks) & {local for job in p.jobs for local, _ in job.pairs}, "freed under a write"
        prefill.reported_by.add(rank)
        if len(prefill.reported_by) == self.prefill_tp:
            del self.prefills[report.engine_request_id]
            self.free_p(prefill.blocks)

    def _received(self, rank: int, report: ReceiveReport) -> None:
        name, d = report.receive.engine_request_id, self.d[rank]
        receiver = self.receivers[name]
        assert rank not in receiver.ended, "reported twice"
        receiver.ended[rank] = report.outcome
        writing = {
            remote
            for p in self.p
            for job in p.jobs
            if (job.target, job.generation) == (rank, d.generation)
            for _, remote in job.pairs
        }
        landing = {remote for generation, _, remote in d.late if generation == d.generation}
        assert not (writing | landing) & d.all_of(receiver.blocks), "reported while its blocks may be written"
        if report.outcome is Outcome.OK:
            for index, block in enumerate(receiver.blocks):
                for layer in range(2):
                    found = [d.memory.get(address) for address in d.addresses(block, layer)]
                    assert found == d.share(receiver.number, index, layer)
        if len(receiver.ended) == self.decode_tp:
            del self.receivers[name]
            self.offers.stop(name)
            self.d_free += receiver.blocks
            for other in self.d:
                other.memory.update(dict.fromkeys(other.all_of(receiver.blocks), -2))
