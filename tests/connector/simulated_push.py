"""Values of push's random-event test: memory of two layers, P's writing thread, and bytes that land late."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.layout import KvRegion
from connector.push_legs import StartWrite
from connector.settings import ConnectorSettings
from connector.step import Push
from connector.transfers import Outcome
from pdq.wire.types import KvSource, Pair

SETTINGS = ConnectorSettings(
    kv_lease_s=6.0, kv_hold_s=20.0, kv_wait_s=15.0, kv_push_wait_s=60.0, kv_answer_s=0.5, kv_answer_tries=4
)
P_BLOCKS, D_BLOCKS, LAYERS = 12, 12, ("l0", "l1")
PAIR = Pair(gen=1, attempt=1)
SOURCE = KvSource(engine_id="p", epoch="p-1", host="p", port=7, tp_size=1, block_size=16)
P_BASE, D_BASE, STRIDE = 1000, 5000, 100


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
    """At P."""

    number: int
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
            transfer_id=self.name,
            pair=PAIR,
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
