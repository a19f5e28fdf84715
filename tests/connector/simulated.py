"""Values of the random-event test: P's prefills, D's engines, and what their transports are moving."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.layout import KvRegion, Runs
from connector.loads import Loads
from connector.settings import ConnectorSettings
from connector.side_channel import Answer, Request
from connector.step import Load
from connector.transfers import Outcome
from pdq.wire.types import KvTicket, Pair, pack_ids

SETTINGS = ConnectorSettings(kv_lease_s=6.0, kv_hold_s=20.0, kv_wait_s=15.0, kv_answer_s=0.5, kv_answer_tries=4)
P_BLOCKS, D_BLOCKS, BASE = 12, 24, 1000
PAIR = Pair(gen=1, attempt=1)


def region(num_blocks: int) -> KvRegion:
    """A block is one byte, so an address is a block."""
    return KvRegion(layer="all", base_address=BASE, block_stride_bytes=1, num_blocks=num_blocks)


@dataclass
class Reading:
    leg_id: int
    pairs: list[tuple[int, int]]
    """(local block, remote block) still to be copied."""
    stop: bool = False
    is_broken: bool = False


@dataclass
class Prefill:
    name: str
    blocks: list[int]
    content: list[int]
    is_written: bool = False
    """All bytes are in place, so a ticket may exist; P's worker half may not know it yet."""
    is_pinned: bool = False
    contact: dict[str, float] = field(default_factory=dict)
    """Per consumer that has an unfinished claim: when P heard of it last."""

    def heard_of(self, consumer: str, now: float, *, claims: bool) -> None:
        if claims or consumer in self.readers(now):
            self.contact[consumer] = now

    def readers(self, now: float) -> list[str]:
        return [name for name, at in self.contact.items() if now - at < SETTINGS.kv_lease_s]


@dataclass
class Consumer:
    name: str
    loads: Loads
    memory: list[int] = field(default_factory=lambda: [0] * D_BLOCKS)
    free: list[int] = field(default_factory=lambda: list(range(D_BLOCKS)))
    readings: list[Reading] = field(default_factory=list)
    to_p: list[Request] = field(default_factory=list)
    from_p: list[Answer] = field(default_factory=list)
    blocks_of: dict[str, list[int]] = field(default_factory=dict)
    reported: dict[str, Outcome] = field(default_factory=dict)


def descriptors_of(runs: Runs) -> list[tuple[int, int]]:
    """(local block, remote block)."""
    return [
        (local - BASE + i, remote - BASE + i)
        for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True)
        for i in range(length)
    ]


def load_of(prefill: Prefill, blocks: list[int], first_block: int) -> Load:
    ticket = KvTicket(
        transfer_id=prefill.name,
        pair=PAIR,
        engine_id="p",
        epoch="p-1",
        host="p",
        port=7,
        tp_size=1,
        block_size=16,
        num_tokens=16 * len(blocks),
        block_ids=pack_ids(prefill.blocks),
    )
    return Load(engine_request_id=prefill.name, ticket=ticket, block_ids=tuple(blocks), first_block=first_block)
