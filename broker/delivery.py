"""When a job is due, how long a lease lasts, and what a failure leads to. Pure: times come in, decisions go out.

`due` orders the whole queue by one number that never changes, so nothing is ever scored again:

    due = start + slack(priority) + due_factor * estimated prefill time
    start = arrival, or the tenant's virtual time when that is later (by `tenant_debt_s` at most)

A request that comes back under a higher gen starts from its first arrival, whoever came meanwhile: its client has
waited since then.

Shorter prompts go first, but a job of estimate x can only be overtaken by those that arrive within due_factor * x after
it (priority and tenants aside): waiting is bounded. due_factor 0 is first come, first served.

Tenants: each job moves its tenant's virtual time by its tokens * `tenant_ms_per_token`, from now or from where it
stands. A tenant that asks for more than one worker's worth falls behind those that ask for less, by a bounded time.
Jobs without a tenant are never held back. That is fair until the bound is reached; it is no exact fair queueing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

PRIORITY_LIMIT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    lease_s: float = field(default=6.0, metadata={"help": "a job whose worker is silent this long goes to another one"})
    max_failures: int = field(default=3, metadata={"help": "a job that failed so often becomes a dead letter"})
    due_factor: float = field(
        default=3.0, metadata={"help": "how much longer prompts yield; 0: first come, first served"}
    )
    prefill_ms_per_token: float = field(
        default=1.0,
        metadata={"help": "estimate of the prefill time until workers measured it", "unit": "ms/token"},
    )
    priority_step_s: float = field(default=10.0, metadata={"help": "one priority level lower waits so much longer"})
    tenant_ms_per_token: float = field(
        default=1.0, metadata={"help": "what a token costs its tenant in virtual time; 0: off", "unit": "ms/token"}
    )
    tenant_debt_s: float = field(default=30.0, metadata={"help": "a busy tenant is held back by this at most"})
    orphan_s: float = field(default=10.0, metadata={"help": "jobs of a gateway that is silent this long are dropped"})
    req_ttl_s: float = field(default=120.0, metadata={"help": "how long Redis tells what became of a request"})
    max_dead_letters: int = field(default=1000, metadata={"help": "older dead letters are dropped"})
    dead_payload_ttl_s: float = field(default=3600.0, metadata={"help": "how long a dead letter's payload is kept"})
    take_scan_max: int = field(default=100, metadata={"help": "most queue entries that one script call looks at"})
    reap_batch: int = field(default=100, metadata={"help": "most expired leases that one script call takes back"})
    reap_calls_max: int = field(default=500, metadata={"help": "most script calls of one reap"})
    consumer_idle_s: float = field(default=3600.0, metadata={"help": "names of idle workers are dropped after this"})

    def __post_init__(self) -> None:
        if (
            self.lease_s < 0
            or self.max_failures < 1
            or min(self.take_scan_max, self.reap_batch, self.reap_calls_max) < 1
        ):
            raise ValueError("lease_s must not be negative; max_failures, take_scan_max and reap_* must be at least 1")


class Verdict(enum.Enum):
    PUT_BACK = "put_back"
    DEAD_LETTER = "dead_letter"


def slack_ms(priority: int, settings: QueueSettings) -> float:
    """Lower numbers go first, as in vLLM; 0 is normal. Clamped, so that waiting stays bounded."""
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, priority)) * settings.priority_step_s * 1000


def ms_to_due(
    priority: int, num_tokens: int, settings: QueueSettings, *, prefill_ms: float = 0.0, waited_s: float = 0.0
) -> int:
    """From the start (arrival of this gen, or tenant's virtual time) to due; may be negative. `prefill_ms` 0: no
    estimate."""
    estimate_ms = prefill_ms or settings.prefill_ms_per_token * num_tokens
    return round(slack_ms(priority, settings) + settings.due_factor * estimate_ms - waited_s * 1000)


def tenant_start_ms(now_ms: float, virtual_ms: float | None, settings: QueueSettings) -> float:
    """Where a tenant's next job starts."""
    if virtual_ms is None:
        return now_ms
    return min(max(now_ms, virtual_ms), now_ms + settings.tenant_debt_s * 1000)


def tenant_cost_ms(num_tokens: int, settings: QueueSettings) -> int:
    """How far a job moves its tenant's virtual time."""
    return round(num_tokens * settings.tenant_ms_per_token)


def after_failure(failures: int, settings: QueueSettings) -> Verdict:
    """`failures` includes the one that has just happened."""
    return Verdict.DEAD_LETTER if failures >= settings.max_failures else Verdict.PUT_BACK


def cause_of(failure: str) -> str:
    """The stable word that a failure begins with (`engine_error: out of memory`), for counting."""
    word, colon, _ = failure.partition(":")
    return word if colon and word.isidentifier() else "failed"


def is_expired(taken_or_renewed_ms: float, now_ms: float, settings: QueueSettings) -> bool:
    return now_ms - taken_or_renewed_ms >= settings.lease_s * 1000
