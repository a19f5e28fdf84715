"""What push's random-event test plays on: memory of two layers, P's writing thread, bytes that land late, a network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from connector.layout import KvRegion
from connector.legs import Send
from connector.offers import Offers
from connector.push_exchange import other_epoch
from connector.push_legs import PushReport, ReceiveReport, StartWrite, StopWrites
from connector.pushes import Pushes
from connector.receptions import Receptions
from connector.settings import ConnectorSettings
from connector.side_channel import (
    Answer,
    Cancel,
    Hello,
    Meta,
    Open,
    PushDone,
    PushFail,
    RecvReady,
    Reject,
    Request,
)
from connector.step import Push, Receive
from connector.transfers import Outcome, TransferKey
from pdq.wire.types import KvSource, Pair, pack_ids

SETTINGS = ConnectorSettings(
    kv_lease_s=6.0, kv_hold_s=20.0, kv_wait_s=15.0, kv_push_wait_s=60.0, kv_answer_s=0.5, kv_answer_tries=4
)
P_BLOCKS, D_BLOCKS, LAYERS = 12, 12, ("l0", "l1")
PAIR = Pair(gen=1, attempt=1)
SOURCE = KvSource(engine_id="p", epoch="p-1", host="p", port=7, tp_size=1, block_size=16)
"""P in its first life."""
P_BASE, D_BASE, STRIDE = 1000, 5000, 100
P_AT, D_AT = "tcp://p:7", "tcp://d:9"


def regions(base: int, num_blocks: int) -> list[KvRegion]:
    """A layer of a block is one byte, so an address is a layer of a block."""
    return [
        KvRegion(layer=layer, base_address=base + index * STRIDE, block_stride_bytes=1, num_blocks=num_blocks)
        for index, layer in enumerate(LAYERS)
    ]


def addresses(base: int, block: int) -> list[int]:
    return [base + index * STRIDE + block for index in range(len(LAYERS))]


@dataclass
class Prefill:
    """At P: one attempt of one transfer."""

    number: int
    key: TransferKey
    num_blocks: int
    blocks: list[int]
    num_computed: int = 0
    is_left: bool = False

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def push(self) -> Push:
        return Push(
            engine_request_id=self.name,
            transfer_id=self.key.transfer_id,
            pair=self.key.pair,
            num_tokens=self.num_blocks * 16,
            block_size=16,
        )


def content(number: int, index: int, layer: int) -> int:
    return number * 100 + index * 10 + layer


@dataclass
class Job:
    job_id: int
    push_id: int
    generation: int
    pairs: list[tuple[int, int]]
    """(P's address, D's address) still to be copied."""

    @classmethod
    def of(cls, action: StartWrite) -> Job:
        runs = action.runs
        pairs = [
            (local + i, remote + i)
            for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True)
            for i in range(length)
        ]
        return cls(action.job_id, action.push_id, int(action.address.partition(":")[2]), pairs)


@dataclass
class Receiver:
    """At D."""

    number: int
    blocks: list[int]
    first_block: int
    outcome: Outcome | None = None
    addresses: set[int] = field(default_factory=set)


class PushSimulation:
    """Both cores, the network between them, the memory of both and what is under way. `settle` after every event."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.memory: dict[int, int] = {}
        self.p_free, self.d_free = list(range(P_BLOCKS)), list(range(D_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.receivers: dict[str, Receiver] = {}
        self.reported: set[str] = set()
        self.jobs: list[Job] = []
        self.late: list[tuple[int, int, int]] = []
        """(generation, value, D's address) of failed calls."""
        self.generation = 0
        self.to_p: list[Request | Answer] = []
        self.to_d: list[Request | Answer] = []
        self.p_lives = self.d_lives = 0
        self.keys: dict[int, TransferKey] = {}
        """Of prefill number n."""
        self.start_p()
        self.start_d()

    def start_p(self) -> None:
        """Its process, for the first time or again, at the same address. What it was writing may land later."""
        self.p_lives += 1
        self.p_epoch = f"p-{self.p_lives}"
        for job in self.jobs:
            self.late += self.under_way(job)
        self.jobs.clear()
        self.prefills.clear()
        self.p_free.clear()
        self.free_p(list(range(P_BLOCKS)))
        self.pushes = Pushes(SETTINGS, hello=self.hello(self.p_epoch), regions=regions(P_BASE, P_BLOCKS))

    def start_d(self) -> None:
        """The same of D's. Its transport is a new one."""
        self.d_lives += 1
        self.d_epoch = f"d-{self.d_lives}"
        self.generation += 1
        self.is_fence_wanted = self.is_fence_done = False
        self.reported |= self.receivers.keys()
        self.receivers.clear()
        self.unheard: list[Receive] = []
        """What D's rank will hear with its next step."""
        self.d_free = list(range(D_BLOCKS))
        self.receptions = Receptions(
            SETTINGS, hello=self.hello(self.d_epoch), transport_at=lambda: (f"d:{self.generation}", self.generation)
        )
        self.offers = Offers(SETTINGS, consumer=self.d_epoch)

    @property
    def source(self) -> KvSource:
        return replace(SOURCE, epoch=self.p_epoch)

    def key_of(self, number: int) -> TransferKey:
        return self.keys.setdefault(number, TransferKey(transfer_id=f"t{number}", pair=Pair(gen=1, attempt=1)))

    def ready_of(self, number: int, num_blocks: int, first_block: int, blocks: list[int]) -> RecvReady:
        key = self.key_of(number)
        return RecvReady(
            epoch=self.p_epoch,
            transfer_id=key.transfer_id,
            pair=key.pair,
            consumer=self.d_epoch,
            host="d",
            port=9,
            tp_size=1,
            block_size=16,
            num_tokens=16 * num_blocks,
            first_block=first_block,
            block_ids=pack_ids(blocks),
        )

    def hello(self, name: str) -> Hello:
        return Hello(epoch="", consumer=name, rank=0, tp_size=1, fingerprint="a=1")

    def p_hears(self, message: Any) -> None:
        if isinstance(message, RecvReady | Cancel) and message.epoch != self.p_epoch:
            self.to_d.append(other_epoch(message, self.p_epoch))
        elif isinstance(message, RecvReady):
            self.pushes.recv_ready(message, self.to_d.append, self.now)
        elif isinstance(message, Cancel):
            self.pushes.cancel(message, self.to_d.append, self.now)
        else:
            self.pushes.on_answer(D_AT, message, self.now)
        self.settle()

    def d_hears(self, message: Any) -> None:
        if isinstance(message, Hello):
            here = tuple(regions(D_BASE, D_BLOCKS))
            meta = Meta(epoch=self.d_epoch, rank=0, tp_size=1, regions=here, transport_address="d:0")
            is_here = message.epoch == self.d_epoch
            self.to_p.append(meta if is_here else Reject(epoch=message.epoch, reason="restarted"))
        elif isinstance(message, Open | PushDone | PushFail) and message.epoch != self.d_epoch:
            self.to_p.append(other_epoch(message, self.d_epoch))
        elif isinstance(message, Open | PushDone | PushFail):
            self.receptions.on_message(message, self.to_p.append, self.now)
        else:
            self.offers.on_message(P_AT, message, self.now)
            self.receptions.on_answer(P_AT, message, self.now)
        self.settle()

    def break_off(self, job: Job) -> None:
        """What the call has under way may land later. P fences, so nothing is read any more."""
        self.late += self.under_way(job)
        self.jobs.remove(job)
        self.pushes.broken(job.job_id, job.push_id, "status -1", False, self.now)

    def under_way(self, job: Job) -> list[tuple[int, int, int]]:
        return [(job.generation, self.memory[local], remote) for local, remote in job.pairs]

    def land(self, value: int, remote: int) -> None:
        owners = [name for name, r in self.receivers.items() if remote in r.addresses]
        assert owners, "a byte landed in blocks that were given back"
        assert owners == [f"r{value // 100}"], "another request's byte"
        self.memory[remote] = value

    def settle(self) -> None:
        self.pushes.tick(self.now)
        self.receptions.tick(self.now)
        self.to_p += [message for _, message in self.offers.tick(self.now)]
        for lost in self.offers.take_lost():
            self.receptions.lose(lost, self.now)
        for action in self.pushes.take_actions():
            if isinstance(action, Send):
                self.to_d.append(action.message)
            elif isinstance(action, StartWrite):
                self.jobs.append(Job.of(action))
            elif isinstance(action, StopWrites):
                for job in [job for job in self.jobs[1:] if job.push_id == action.push_id]:
                    self.jobs.remove(job)
                    self.pushes.dropped(job.job_id, job.push_id, self.now)
                self.settle()
            else:
                self._pushed(action)
        for answer in self.receptions.take_actions():
            if isinstance(answer, Send):
                self.to_p.append(answer.message)
            elif isinstance(answer, ReceiveReport):
                self._received(answer)
            else:
                self.is_fence_wanted = True

    def _pushed(self, report: PushReport) -> None:
        prefill = self.prefills.pop(report.engine_request_id)  # KeyError: freed twice
        assert prefill.is_left
        mine = {address for block in prefill.blocks for address in addresses(P_BASE, block)}
        assert not any(local in mine for job in self.jobs for local, _ in job.pairs), "freed under a write"
        self.free_p(prefill.blocks)

    def free_p(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory.update(dict.fromkeys(addresses(P_BASE, block), -1))  # anybody's now
        self.p_free += blocks

    def _received(self, report: ReceiveReport) -> None:
        name = report.receive.engine_request_id
        receiver = self.receivers.pop(name)  # KeyError: reported twice
        self.reported.add(name)
        writing = {remote for job in self.jobs if job.generation == self.generation for _, remote in job.pairs}
        landing = {remote for generation, _, remote in self.late if generation == self.generation}
        assert not (writing | landing) & receiver.addresses, "reported while its blocks may be written"
        if report.outcome is Outcome.OK:
            for index, block in list(enumerate(receiver.blocks))[receiver.first_block :]:
                found = [self.memory.get(address) for address in addresses(D_BASE, block)]
                assert found == [content(receiver.number, index, layer) for layer in range(2)]
        for block in receiver.blocks:
            self.memory.update(dict.fromkeys(addresses(D_BASE, block), -2))
        self.d_free += receiver.blocks
