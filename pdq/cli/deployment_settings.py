"""What `pdq up` and `pdq demo` can be told: what runs, and where."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pdq.runtime.arguments import Arguments
from pdq.runtime.model import ModelSettings

_DEFAULT_TORCH_MODEL: Final = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSettings:
    """What runs, and where."""

    gateways: int = field(default=1, metadata={"help": "gateway processes; the n-th listens on http-port + n - 1"})
    prefill: int = field(default=1, metadata={"help": "prefill worker processes"})
    decode: int = field(default=1, metadata={"help": "decode worker processes"})
    engine: Literal["torch", "sim", "vllm"] = field(
        default="torch", metadata={"help": "torch: a real model on the CPU; sim: no model, simulated times; vllm"}
    )
    engine_args: Arguments = field(
        default=Arguments(), metadata={"help": "vllm: its engine arguments, for all workers"}
    )
    engine_threads: int | None = field(
        default=None, metadata={"help": "threads per worker on a CPU; none: the cores shared out, at least 1"}
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    """`--engine torch` and `vllm` without `--model` take smollm2-135m."""
    redis: str | None = field(default=None, metadata={"help": "URL of a running Redis; none: starts an embedded one"})
    http_host: str = field(default="127.0.0.1", metadata={"help": "address that the gateways listen on"})
    http_port: int = field(default=8000, metadata={"help": "port of the first gateway"})
    run_dir: Path = field(default=Path(".pdq"), metadata={"help": "folder for addresses, logs and the embedded Redis"})
    fresh: bool = field(default=False, metadata={"help": "empty the embedded Redis first"})
    stop_grace_s: float = field(default=40.0, metadata={"help": "at the end: time per process before it is killed"})
    restart_min_s: float = field(default=0.5, metadata={"help": "delay before a dead process starts again; doubles"})
    restart_max_s: float = field(default=30.0, metadata={"help": "longest such delay"})

    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata={"help": "least important log lines of the processes"}
    )

    def __post_init__(self) -> None:
        if min(self.gateways, self.prefill, self.decode) < 0:
            raise ValueError("--gateways, --prefill and --decode are numbers of processes: 0 or more")
        if self.gateways + self.prefill + self.decode == 0:
            raise ValueError("nothing to run: --gateways, --prefill and --decode are all 0")

    @property
    def served_model(self) -> ModelSettings:
        """The model, with the engine's default where none was given."""
        if self.engine != "sim" and self.model.is_sim:
            return dataclasses.replace(self.model, model=_DEFAULT_TORCH_MODEL)
        return self.model

    @property
    def worker_threads(self) -> int:
        """More threads than cores spin against each other: a demo on 2 busy cores took 4 times as long."""
        return self.engine_threads or max(1, (os.cpu_count() or 1) // max(1, self.prefill + self.decode))

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.http_host in ("0.0.0.0", "::", "*") else self.http_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}"
