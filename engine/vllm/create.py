"""A VllmEngine from a worker's settings: ports and environment come first, then vLLM may be imported."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any, Final, Literal

from connector.settings import ConnectorSettings
from engine.embedded.settings import EngineSettings
from engine.embedded.weights_digest import weights_digest
from engine.vllm.checks import tp_size_of
from engine.vllm.client import VllmEngine
from engine.vllm.environment import CHILD_VARIABLE, Child, defaults, plugins_with_ours
from engine.vllm.launch import Plan
from engine.vllm.processes import VllmProcesses
from engine.vllm.settings import VllmSettings
from engine.vllm.shared_files import SharedFiles
from engine.vllm.side_channel_ports import SidePorts
from pdq.runtime.settings import environment, set_environment

CONNECTORS: Final = {"pull": "PdqMooncakeConnector", "push": "PdqMooncakeLayerwiseConnector"}
"""By mode; in mode local there is none."""
ROLES: Final = {"producer": "prefill", "consumer": "decode"}
"""In logs."""


def create_vllm_engine(
    settings: VllmSettings,
    engine: EngineSettings,
    connector: ConnectorSettings,
    *,
    model_path: Path,
    mode: Literal["pull", "push", "local"],
    role: Literal["producer", "consumer"],
    worker_id: str,
    log_level: str,
    log_json: bool | None,
) -> VllmEngine:
    """Not started yet. Raises EngineError when no side-channel port is free; other checks have been made."""
    tp_size = tp_size_of(settings.engine_args)
    epoch = secrets.token_hex(8)
    host = connector.side_channel_host
    ports = SidePorts(host, tp_size, first=connector.side_channel_port)
    connector = dataclasses.replace(connector, side_channel_port=ports.first)
    has_connector = mode in CONNECTORS
    files = SharedFiles()
    plan = Plan(
        arguments=settings.engine_args,
        model_path=str(model_path),
        max_model_len=engine.max_model_len,
        kv_cache_bytes=_given(engine, "kv_cache_bytes"),
        cpu_kv_cache_bytes=engine.kv_cache_bytes,
        tp_size=tp_size,
        role=role,
        kv_transfer=kv_transfer(
            settings,
            connector,
            mode=mode,
            role=role,
            engine_id=worker_id,
            epoch=epoch,
            layer_count_path=files.layer_count_path,
        )
        if has_connector
        else None,
    )
    processes = VllmProcesses(plan, files, ports, start_s=settings.vllm_start_s, stop_s=settings.vllm_stop_s)
    child = Child(
        failures_path=str(files.failures_path),
        log_level=log_level,
        log_json=log_json,
        role=ROLES[role],
        worker_id=worker_id,
    )
    set_environment(defaults(settings, host=host, threads=engine.engine_threads), keep=True)
    set_environment(plugins_with_ours(environment().get("VLLM_PLUGINS")), keep=False)
    set_environment({CHILD_VARIABLE: child.to_text()}, keep=False)
    return VllmEngine(
        processes,
        files,
        engine_id=worker_id,
        epoch=epoch,
        host=host,
        side_channel_port=ports.first,
        tp_size=tp_size,
        has_connector=has_connector,
        fingerprint={"mode": mode, "weights": weights_digest(model_path) or "-"},
        start_s=settings.vllm_start_s,
    )


def kv_transfer(
    settings: VllmSettings,
    connector: ConnectorSettings,
    *,
    mode: str,
    role: str,
    engine_id: str,
    epoch: str,
    layer_count_path: Path | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's KVTransferConfig. The connector's host and port are those that it shall listen on."""
    counting = {"pdq_layer_count_path": str(layer_count_path)} if layer_count_path else {}
    path, _, name = (settings.vllm_connector or f"connector.plugin:{CONNECTORS[mode]}").partition(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": path,
        "kv_role": f"kv_{role}",
        "engine_id": engine_id,
        "kv_load_failure_policy": settings.vllm_load_failure,
        "kv_connector_extra_config": {
            "pdq_epoch": epoch,
            "pdq_side_channel_host": connector.side_channel_host,
            "pdq_side_channel_port": connector.side_channel_port,
            "pdq_connector": dataclasses.asdict(connector),
            **counting,
        },
    }


def _given(engine: EngineSettings, name: str) -> int:
    """0: it is the default, which is for small models on a CPU."""
    value: int = getattr(engine, name)
    return 0 if value == getattr(EngineSettings(), name) else value
