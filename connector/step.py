"""What the two halves of one engine tell each other: step metadata down, transfer results up. Picklable data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdq.wire.types import KvSource, KvTicket, Pair, TransferStats


class Scheduled(NamedTuple):
    """What the engine's scheduler decided for one request of the next step."""

    engine_request_id: str
    block_ids: Sequence[int]
    """Its block table."""
    num_tokens: int
    """Computed when the step has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """P: a prefill has begun whose KV somebody will read. Known early, so that no reader comes too early."""

    engine_request_id: str
    transfer_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """D: read the ticket's blocks from `first_block` on into `block_ids`."""

    engine_request_id: str
    ticket: KvTicket
    block_ids: tuple[int, ...]
    """All blocks of the request, in order: entry i holds the same tokens as the ticket's entry i."""
    first_block: int
    """Entries before it are valid already (local prefix hit)."""
    failed: str | None = None
    """Not None: the transfer can't succeed; report it failed with this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """P: a prefill will be computed whose KV is to be written into somebody's blocks."""

    engine_request_id: str
    transfer_id: str
    pair: Pair
    num_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """P: this step makes blocks of a push final, layer after layer. Blocks found in the prefix cache are among them."""

    engine_request_id: str
    block_ids: tuple[int, ...]
    """Those that follow the ones of earlier steps."""
    is_last: bool
    """The prefill ends with this step; a partial last block is among the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPush:
    """P: the prefill ended without (all of) its KV."""

    engine_request_id: str
    reason: str
    is_reported: bool
    """It holds blocks, which stay until it is reported in `finished_sending`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """D: P was told of this request's blocks. Reported in `finished_recving` once written, or safe again."""

    engine_request_id: str
    transfer_id: str
    pair: Pair
    source: KvSource
    num_tokens: int


class Lost(NamedTuple):
    """D: P will not write (all of) this receive."""

    engine_request_id: str
    reason: str
    is_silent: bool
    """A rank of P does not answer: it is dead, stopped or cut off, and need not be asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeta:
    """From the scheduler half to every worker half, each step. Empty in most steps."""

    expected: tuple[Expect, ...] = ()
    pinned: tuple[str, ...] = ()
    """P: engine_request_ids whose prefill has ended: blocks stay until reported in `finished_sending`."""
    forgotten: tuple[str, ...] = ()
    """P: expected, but ended without KV (aborted, failed). Never reported."""
    released: tuple[str, ...] = ()
    """P: pinned, but nobody will come: free as soon as no reader is active."""
    loads: tuple[Load, ...] = ()
    cancelled: tuple[str, ...] = ()
    """D: loads that nobody waits for any more; still reported in `finished_recving`, once drained."""

    pushes: tuple[Push, ...] = ()
    preempted: tuple[str, ...] = ()
    """P: pushes whose blocks were taken away; all will be computed again, into other blocks."""
    saves: tuple[Save, ...] = ()
    pushed: tuple[str, ...] = ()
    """P: pushes whose prefill has ended well: blocks stay until reported in `finished_sending`."""
    stopped: tuple[StopPush, ...] = ()
    receives: tuple[Receive, ...] = ()
    lost: tuple[Lost, ...] = ()
    """D: receives that can't succeed any more; still reported, once safe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResults:
    """What a worker half has to report. Each id appears exactly once over the half's life."""

    finished_sending: frozenset[str] = frozenset()
    """P: no reader needs the blocks any more; or they are written, or the push was given up."""
    finished_recving: frozenset[str] = frozenset()
    """D: nothing writes the blocks any more: loaded, failed or cancelled."""
    failed_recving: dict[str, str] = field(default_factory=dict)
    """D: those of `finished_recving` whose blocks are not valid, with the reason."""
    stats: dict[str, TransferStats] = field(default_factory=dict)
    """D: of those loaded."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of what happened since the last report: renewals, prefills_expired, retries, fences, answers_ignored."""
    fatal: str | None = None
    """Not None: the half can't give blocks back safely any more; the worker must drain and restart."""

    @property
    def is_empty(self) -> bool:
        return not (self.finished_sending or self.finished_recving or self.fatal)
