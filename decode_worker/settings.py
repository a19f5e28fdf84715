"""All settings of a decode worker process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerSettings:
    expected_output_tokens: int = field(
        default=256,
        metadata={"help": "output tokens promised room at admission (fewer when max_tokens is less); more may preempt"},
    )
    answer_memory_s: float = field(
        default=20.0, metadata={"help": "how long a given answer is remembered for a repeated KvReady"}
    )
    decode_stall_s: float = field(
        default=10.0,
        metadata={"help": "an engine without a sign of life or progress for this long gets no new requests"},
    )
    admit_tries: int = field(
        default=4,
        metadata={"help": "times to ask a gateway for Go; below notice_tries, so that P still hears of the silence"},
    )
