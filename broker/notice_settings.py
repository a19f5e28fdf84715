"""How long a notice waits for its answer; shared by all who send notices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSettings:
    notice_ack_s: float = field(default=0.2, metadata={"help": "how long a notice waits for its answer before a repeat"})
    notice_tries: int = field(default=5, metadata={"help": "how often a notice is sent before its peer counts as gone"})
