"""The engine that a worker's settings ask for, and what can be checked before it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.registry import Collector

from connector.settings import ConnectorSettings
from connector.validate import installation_problems, problems
from engine.base import Engine, EngineError, EngineInfo
from engine.embedded.client import ENGINE_COMMAND, EmbeddedEngine
from engine.embedded.settings import EngineSettings
from engine.vllm.checks import problems as vllm_problems
from engine.vllm.checks import tp_size_of
from engine.vllm.prometheus import VllmCollector
from engine.vllm.settings import VllmSettings
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.errors import StartupError
from pdq.runtime.logs import is_json
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import FixedPort


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessSettings:
    """The engine and the connector inside it."""

    engine_stall_exit_s: float = field(
        default=30.0,
        metadata={"help": "a worker whose engine stands still for so much longer than the stall time ends with code 1"},
    )
    engine: EngineSettings = field(default_factory=EngineSettings)
    connector: ConnectorSettings = field(default_factory=ConnectorSettings)
    vllm: VllmSettings = field(default_factory=VllmSettings)


def engine_ports(settings: EngineProcessSettings) -> list[FixedPort]:
    """Ports that the engine process will bind, to be checked before anything starts: one per rank."""
    connector = settings.connector
    num_ranks = _num_ranks(settings)
    first = connector.side_channel_port
    ports = [first + rank for rank in range(num_ranks)] if first else [0]
    return [FixedPort(host=connector.side_channel_host, port=port, setting="--side-channel-port") for port in ports]


def create_engine(
    settings: EngineProcessSettings,
    model: ModelSettings,
    runtime: RuntimeSettings,
    *,
    role: Literal["producer", "consumer"],
    worker_id: str,
    command: Sequence[str] = ENGINE_COMMAND,
) -> Engine:
    """Not started yet. Raises StartupError when model and engine, or settings of the connector, don't go together."""
    if found := installation_problems() + problems(settings.connector):
        raise StartupError("; ".join(found))
    engine = settings.engine
    if engine.engine == "vllm":
        return _vllm(settings, model, runtime, role=role, worker_id=worker_id)
    if engine.engine == "torch":
        if model.is_sim:
            raise StartupError("--engine torch needs --model: a model folder, or a name that `pdq model fetch` fetched")
        engine = dataclasses.replace(engine, model_path=str(model.folder()))
    return EmbeddedEngine(
        engine,
        settings.connector,
        role=role,
        engine_id=worker_id,
        worker_id=worker_id,
        mode=model.mode,
        log_level=runtime.log_level,
        command=command,
    )


def _num_ranks(settings: EngineProcessSettings) -> int:
    if settings.engine.engine != "vllm":
        return 1
    try:
        return tp_size_of(settings.vllm.engine_args)
    except ValueError as error:
        raise StartupError(str(error)) from error


def _vllm(
    settings: EngineProcessSettings,
    model: ModelSettings,
    runtime: RuntimeSettings,
    *,
    role: Literal["producer", "consumer"],
    worker_id: str,
) -> Engine:
    if model.is_sim:
        raise StartupError("--engine vllm needs --model: a model folder, or a name that `pdq model fetch` fetched")
    if found := vllm_problems(settings.vllm.engine_args, settings.engine, settings.connector):
        raise StartupError("; ".join(found))
    from engine.vllm.create import create_vllm_engine

    try:
        return create_vllm_engine(
            settings.vllm,
            settings.engine,
            settings.connector,
            model_path=model.folder(),
            mode=model.mode,
            role=role,
            worker_id=worker_id,
            log_level=runtime.log_level,
            log_json=is_json(runtime.log_format),
        )
    except EngineError as error:
        raise StartupError(str(error)) from error


def engine_collectors(settings: EngineProcessSettings) -> list[Collector]:
    """Prometheus figures that the engine keeps itself, for the registry of the process."""
    return [VllmCollector()] if settings.engine.engine == "vllm" else []


async def start_engine(engine: Engine) -> EngineInfo:
    """Raises StartupError with the engine's own reason."""
    try:
        return await engine.start()
    except EngineError as error:
        raise StartupError(str(error)) from error
