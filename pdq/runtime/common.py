"""Settings that every role has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Logs and metrics of one process."""

    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata={"help": "least important log lines to write"}
    )
    log_format: Literal["auto", "json", "console"] = field(
        default="auto", metadata={"help": "auto: console on a terminal, JSON lines elsewhere"}
    )
    metrics_host: str = field(default="127.0.0.1", metadata={"help": "address of the Prometheus listener"})
    metrics_port: int = field(default=0, metadata={"help": "port of the Prometheus listener; 0: none"})
    heartbeat_s: float = field(default=1.0, metadata={"help": "pace of the registry's signs of life"})
    drain_grace_s: float = field(
        default=30.0, metadata={"help": "after SIGTERM: time to finish what is held before it is given back"}
    )
