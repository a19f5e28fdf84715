"""Ports of the queue side: the prefill queue and the registry, with the values they carry.

Adapters: `broker/memory.py` (twin for tests), `broker/redis_queue.py` + `broker/redis_registry.py`.
One contract test body runs over the memory twin, fakeredis, Redis 7 and Valkey.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from pdq.wire.types import Pair, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """A request's unit of queued work. Packed as `pdq:{m}:job:<id>:<gen>`."""

    request_id: str
    gen: int
    prompt_ids: bytes
    generated_ids: bytes
    sampling: SamplingParams
    deadline_s: float
    """From enqueue until the request's deadline; the queue turns it into Redis time."""
    gateway: str
    """Endpoint of the gateway's inbox."""
    gateway_id: str
    mode: str
    tenant: str = ""
    priority: int = 0
    traceparent: str = ""
    failures: int = 0
    """Prefills of this request that came to nothing under lower gens: they count like this gen's own."""
    prefill_ms: float = 0.0
    """Estimated time of the prefill; 0: the queue estimates by itself (`prefill_ms_per_token`)."""
    waited_s: float = 0.0
    """How long ago its first gen arrived; 0: this is the first. A request that moves on keeps its place in the queue,
    and its tenant has paid."""

    @property
    def num_tokens(self) -> int:
        return (len(self.prompt_ids) + len(self.generated_ids)) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLease:
    """The right to work on a job until the lease runs out; fenced by owner and attempt."""

    job: PrefillJob
    entry_id: str
    owner: str
    pair: Pair
    remaining_s: float
    """Until the request's deadline, at the moment of the take."""
    queue_wait_s: float
    failures: int
    """Crashes and engine failures so far; giving back doesn't count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJob:
    """A job that the queue itself ended (expired, orphaned, too many failures, payload lost).

    The client must be told.
    """

    request_id: str
    pair: Pair
    gateway: str
    gateway_id: str
    reason: str
    """`deadline`, `orphaned`, `max_attempts`, `payload_lost`, `payload_invalid`."""
    detail: str

    @property
    def code(self) -> str:
        """What the client is told."""
        return CODE_OF_END.get(self.reason, self.reason)

    @property
    def is_retryable(self) -> bool:
        """Nothing is wrong with the request: its payload got lost, or its gateway was away for a while."""
        return self.reason in RETRYABLE_ENDS


CODE_OF_END: Final = {
    "deadline": "deadline_exceeded",
    "refused": "prompt_too_long",
    "max_attempts": "max_attempts",
    "orphaned": "orphaned",
    "payload_invalid": "payload_invalid",
    "payload_lost": "payload_lost",
}
"""What the client is told of a job that ended without an answer, whether a notice says so or the queue is asked.

Other ends (`decoding`, `gone`) mean that some worker was to have it.
"""

RETRYABLE_ENDS: Final = frozenset({"orphaned", "payload_lost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFate:
    """What the store knows of a job."""

    state: str
    """`lost` (no trace, or not enough for anybody to take it), `queued`, `prefill`, or how it ended: what settle said,
    `cancelled`, or a `DeadJob.reason`."""
    detail: str = ""

    @property
    def is_open(self) -> bool:
        """Somebody will take it, or has it."""
        return self.state in ("queued", "prefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    leases: tuple[JobLease, ...]
    dead: tuple[DeadJob, ...]
    """Ended on the way; the taker sends Failed to their gateways."""
    is_more_waiting: bool = False
    """Jobs were left behind that may be taken: the limits ended the take."""
    is_unsure: bool = False
    """The last call got no answer: the owner may have leases that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Expired leases that were taken back."""

    num_put_back: int
    dead: tuple[DeadJob, ...]
    """The reaper sends Failed to their gateways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    queued: int
    running: int
    dead: int
    oldest_wait_s: float
    queued_tokens: int = 0
    running_tokens: int = 0
    """Estimated, both, for a queue of many hundred jobs."""


class PrefillQueue(Protocol):
    """All calls raise QueueUnavailable when the store refuses or can't be reached; nothing is half-written then."""

    async def enqueue(self, job: PrefillJob) -> str | None:
        """Adds the job once per (request_id, gen) and returns its entry id; a repeat returns the first one's id.

        None: it was cancelled before, and is not queued.
        """

    async def take(self, owner: str, *, max_tokens: int, max_jobs: int, is_idle: bool = True) -> Taken:
        """Jobs in order of `due` while their tokens fit; an empty result when none fits or none waits.

        A job that failed before may be what brings workers down. It is taken alone, and only by an owner with nothing
        else in its engine (`is_idle`), so that it fails alone.
        """

    async def wait(self, timeout_s: float) -> bool:
        """Sleeps until something was enqueued or time is up; takes nothing. True when something came."""

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        """False: this lease is lost (reaped, cancelled, settled, its gateway is gone); stop its work."""

    async def settle(self, lease: JobLease, *, state: str, decode_worker: str = "") -> bool:
        """Removes the job for good. False: it was not ours any more."""

    async def give_back(self, lease: JobLease, *, failure: str | None) -> DeadJob | None:
        """Back to its old place. With a failure it counts; too many make it a dead letter, which is returned."""

    async def reap(self) -> Reaped:
        """Puts jobs with expired leases back to their place; those with too many failures become dead letters."""

    async def cancel(self, request_id: str, gen: int) -> str | None:
        """Right in every state, also before the enqueue. The owner (worker id) to notify, if there is one."""

    async def give_back_others(self, owner: str, keep: tuple[JobLease, ...]) -> int:
        """Gives back what `owner` holds without knowing it; `keep` is what it knows. Call it with no take under way.

        For after a QueueUnavailable: a take may have run although its answer was lost. How many went back.
        """

    async def leave(self, owner: str) -> bool:
        """The last call of an owner that ends: its name is forgotten. False: it holds jobs, so the name stays."""

    async def fates(self, requests: tuple[tuple[str, int], ...]) -> tuple[JobFate, ...]:
        """One for each (request id, gen). One that was never enqueued, or ended long ago, is `lost` too."""

    async def depth(self) -> QueueDepth: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a process says of itself at each heartbeat: `pdq:{m}:worker:<id>`. Readable with HGETALL."""

    worker_id: str
    """`<role>-<host>-<pid>-<random>`: new at each process start (incarnation)."""
    role: str
    """`gateway`, `prefill` or `decode`."""
    state: str
    """`starting`, `ready`, `stalled` (its engine hangs) or `draining`."""
    endpoint: str
    """ZeroMQ inbox, `tcp://host:port`."""
    model: str
    fingerprint: str
    """Of the KV layout and mode; P and D must be equal, but for `tp`. Readable `key=value` pairs: a mismatch shows."""
    tp_size: int = 1
    engine_id: str = ""
    epoch: str = ""
    total_blocks: int = 0
    free_blocks: int = 0
    block_size: int = 0
    running: int = 0
    waiting: int = 0
    parked: int = 0
    http: str = ""
    """Gateways: the address that clients use."""
    max_model_len: int = 0
    """Most tokens of prompt and answer that the worker's engine takes; 0: not said."""
    capabilities: str = ""
    """What its engine can do, `pdq.wire.types.Capability` words; empty: of a version that didn't say."""
    prefill_time: str = ""
    """Prefill workers: how long a prefill takes, as `prefill_time.py` writes it; empty: too few so far."""
    done_tokens: int = 0
    """Since its start: prompt tokens computed (prefill), tokens sent (decode)."""
    clock_ms: int = 0
    """When the record was made, by the process's own clock: comparable with its own words only (`Accepted`)."""


class Registry(Protocol):
    ttl_s: float
    """A process that is silent this long is left out."""

    async def heartbeat(self, record: WorkerRecord) -> bool:
        """Writes the record with its TTL. True: this worker is asked to drain."""

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Live processes. A missing one is not proof of death: a Redis restart takes all of them at once."""

    async def agree(self, config: Mapping[str, str]) -> dict[str, str]:
        """What holds for every process of the model (`mode`): sets what nobody has set, returns what is in force.

        Values live on for one TTL after the last process that agreed.
        """

    async def remove(self, worker_id: str) -> None: ...

    async def ask_to_drain(self, worker_id: str) -> bool:
        """False: no such worker."""

    async def close(self) -> None: ...
