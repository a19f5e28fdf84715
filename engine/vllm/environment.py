"""The environment variables that vLLM and its processes read. Pure: the caller sets them before vLLM is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from engine.vllm.settings import VllmSettings

CHILD_VARIABLE: Final = "_PDQ_VLLM_CHILD"
"""Tells vLLM's child processes whose they are; set by the worker only. No setting: hence the _."""
PLUGIN: Final = "pdq_child"
"""Name of the entry point that reads it (pyproject.toml, group `vllm.general_plugins`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a process of vLLM needs to know of the worker that it belongs to."""

    failures_path: str
    """File that exceptions are appended to, one JSON object a line."""
    log_level: str
    log_json: bool | None
    role: str
    worker_id: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Child:
        return cls(**json.loads(text))


def defaults(settings: VllmSettings, *, host: str, threads: int) -> dict[str, str]:
    """What holds unless the user's environment says otherwise.

    `threads`: of one rank's computations on a CPU, 0 leaves it to vLLM.
    """
    values = {
        # P and D on one host must not be bound to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": host.strip("[]"),
        # The worker has threads: a forked child could hang.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        # The worker and `child` write the lines of vLLM's loggers in pdq's form.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.vllm_start_s))),
    }
    if threads:
        values["OMP_NUM_THREADS"] = str(threads)
    return values


def plugins_with_ours(plugins: str | None) -> dict[str, str]:
    """VLLM_PLUGINS is a list of what may be loaded; not set: all."""
    if plugins is None:
        return {}
    names = [name.strip() for name in plugins.split(",") if name.strip()]
    return {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, "pdq", PLUGIN]))}
