"""The jobs that this worker holds, and what they take of its room."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from broker.base import JobLease
from engine.base import EngineOutput


class Phase(Enum):
    COMPUTING = "computing"
    OFFERING = "offering"
    PARKED = "parked"


class JobOutcome(Enum):
    """How a job left this worker."""

    HANDED_OVER = "handed_over"
    GONE = "gone"
    """The gateway did not want it any more."""
    NO_ROOM = "no_room"
    """Given back: no decode worker took it in time."""
    KV_GONE = "kv_gone"
    """Given back: a decode worker read its KV and then did not take it."""
    EXPIRED = "expired"
    """Its deadline passed before a decode worker took it."""
    FAILED = "failed"
    """Given back: the engine gave it up."""
    REFUSED = "refused"
    """Larger than the KV pool."""
    LOST = "lost"
    """Cancelled, stalled, or its lease was lost; the queue knows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Out of the queue for good."""

    state: str
    decode_worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """To its old place in the queue."""

    failure: str | None


@dataclass(slots=True, kw_only=True, eq=False)
class HeldJob:
    """One leased job. `task` runs it; cancelling the task drops the job without touching the queue."""

    lease: JobLease
    taken_at: float
    """Monotonic seconds."""
    prefill_started_at: float = 0.0
    phase: Phase = Phase.COMPUTING
    was_submitted: bool = False
    """The engine knows it, and will say when its blocks are free."""
    needs_drop: bool = False
    """The engine still has it for us: whoever ends the job aborts or releases it."""
    end: Settle | GiveBack | None = None
    """Decided; the queue may not know yet."""
    is_kv_gone: bool = False
    """The engine has freed its KV: somebody read it. Either that one takes the job, or it has to be computed again."""
    outcome: JobOutcome = JobOutcome.LOST
    """Until it is known better."""
    task: asyncio.Task[None] | None = None
    prefilled: asyncio.Future[EngineOutput] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def engine_request_id(self) -> str:
        return f"{self.lease.job.request_id}:{self.lease.pair.gen}:{self.lease.pair.attempt}"

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled.done() and not self.prefilled.cancelled()

    def prefill_s(self, now: float) -> float:
        """Since the engine was asked."""
        return now - self.prefill_started_at

    def remaining_s(self, now: float) -> float:
        """Until the request's deadline."""
        return max(0.0, self.lease.remaining_s - (now - self.taken_at))

    @property
    def num_tokens(self) -> int:
        return self.lease.job.num_tokens


class HeldJobs:
    """By engine request id."""

    def __init__(self) -> None:
        self._jobs: dict[str, HeldJob] = {}

    def add(self, held: HeldJob) -> None:
        self._jobs[held.engine_request_id] = held

    def remove(self, held: HeldJob) -> None:
        self._jobs.pop(held.engine_request_id, None)

    def get(self, engine_request_id: str) -> HeldJob | None:
        return self._jobs.get(engine_request_id)

    def of_request(self, request_id: str) -> list[HeldJob]:
        return [held for held in self._jobs.values() if held.lease.job.request_id == request_id]

    def all(self) -> list[HeldJob]:
        return list(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def computing_tokens(self) -> int:
        """Taken and not computed yet: in push also those that still look for a decode worker."""
        return sum(held.num_tokens for held in self._jobs.values() if not held.is_prefilled)

    @property
    def is_suspect_computing(self) -> bool:
        """A job that failed before, and may bring the engine down, is not computed yet."""
        return any(held.lease.failures and not held.is_prefilled for held in self._jobs.values())

    @property
    def num_parked(self) -> int:
        """May be asked by other threads."""
        return sum(1 for held in self.all() if held.phase is Phase.PARKED)
