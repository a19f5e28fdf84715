"""All settings of a prefill worker process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerSettings:
    take_tokens: int = field(
        default=2048,
        metadata={"help": "prompt tokens computed at once: more jobs are taken while the running ones are fewer"},
    )
    take_ahead_s: float = field(
        default=0.1,
        metadata={"help": "and while the running ones and the new ones take no longer, as the worker measured it"},
    )
    park_limit: int = field(
        default=8,
        metadata={"help": "finished prefills that may wait for a decode worker; then nothing is taken"},
    )
    park_s: float = field(
        default=30.0, metadata={"help": "how long a finished prefill waits for a decode worker before it is given back"}
    )
    park_retry_s: float = field(
        default=1.0, metadata={"help": "how often a parked prefill asks again when no decode worker tells of room"}
    )
    silent_s: float = field(
        default=3.0,
        metadata={
            "help": "a decode worker that did not answer is asked last for so long; its registry key is gone then"
        },
    )
    prefill_stall_s: float = field(
        default=10.0, metadata={"help": "an engine without progress for this long loses its jobs"}
    )
