"""From a Launch to a running core: runner, KV memory, connector halves, in this order. Runs in the engine process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from connector.settings import ConnectorSettings
from connector.transport import Transport, TransportError
from engine.base import EngineInfo
from engine.embedded.block_pool import BlockPool
from engine.embedded.connector_port import NoScheduler, NoWorker, SchedulerPort, WorkerPort
from engine.embedded.core import EngineCore
from engine.embedded.intake import Limits
from engine.embedded.messages import Launch
from engine.embedded.runner import Runner, RunnerError
from engine.embedded.settings import EngineSettings
from engine.embedded.thread_wait import sleep_while_waiting
from pdq.wire.types import KvSource

Report = Callable[[str], None]
"""Told what is being done, for start-ups that take long."""


def boot(
    launch: Launch,
    *,
    report: Report,
    on_progress: Callable[[], None],
    new_transport: Callable[[ConnectorSettings], Transport] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """`on_progress` is called from connector threads. Raises RunnerError, TransportError, LayoutError, OSError."""
    settings, identity = launch.settings, launch.identity
    make_transport = new_transport or _mooncake
    if launch.connector is not None:
        report("trying the KV transport")  # before the model: it takes longest
        _check_transport(launch.connector, make_transport)
    is_layer_major = identity.mode == "push"
    runner = _new_runner(settings, report, is_layer_major=is_layer_major)
    num_blocks = _num_blocks(settings, runner)
    report(f"{num_blocks} KV blocks of {settings.block_size} tokens, {runner.block_bytes(settings.block_size)} bytes")
    regions = runner.allocate(num_blocks, settings.block_size)
    max_model_len = min(
        settings.max_model_len or runner.max_model_len, runner.max_model_len, num_blocks * settings.block_size
    )
    fingerprint = fingerprint_of(runner, settings, mode=identity.mode)
    scheduler_half: SchedulerPort = NoScheduler()
    worker_half: WorkerPort = NoWorker()
    side_channel_port = 0
    if launch.connector is not None:
        report("connector: transport and side channel")
        from connector.scheduler_half import SchedulerHalf
        from connector.worker_half import WorkerHalf

        worker = WorkerHalf(
            launch.connector,
            engine_id=identity.engine_id,
            epoch=identity.epoch,
            host=launch.connector.side_channel_host,
            side_channel_port=launch.connector.side_channel_port,
            rank=0,
            tp_size=1,
            transport=_slowed(make_transport(launch.connector), settings),
            fingerprint=fingerprint,
            on_progress=on_progress,
        )
        worker.register_kv_caches(regions)
        side_channel_port = worker.port
        scheduler_half, worker_half = (
            SchedulerHalf(
                launch.connector,
                engine_id=identity.engine_id,
                epoch=identity.epoch,
                host=launch.connector.side_channel_host,
                side_channel_port=side_channel_port,
                tp_size=1,
                block_size=settings.block_size,
                role=cast(Literal["producer", "consumer", "both"], identity.role),
                on_progress=on_progress,
            ),
            worker,
        )
    core = EngineCore(
        settings,
        runner,
        scheduler_half,
        worker_half,
        pool=BlockPool(num_blocks),
        regions=regions,
        limits=Limits(max_model_len=max_model_len, vocab_size=runner.vocab_size),
    )
    info = EngineInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        block_size=settings.block_size,
        total_blocks=num_blocks,
        max_model_len=max_model_len,
        kv_source=KvSource(
            engine_id=identity.engine_id,
            epoch=identity.epoch,
            host=launch.connector.side_channel_host if launch.connector is not None else "",
            port=side_channel_port,
            tp_size=1,
            block_size=settings.block_size,
        ),
        fingerprint=fingerprint,
        capabilities=runner.capabilities,
    )
    return core, info


def fingerprint_of(runner: Runner, settings: EngineSettings, *, mode: str) -> str:
    """`key=value` pairs, sorted: two engines with one fingerprint may read each other's blocks."""
    fixed = {"engine": settings.engine, "block_size": str(settings.block_size), "tp": "1", "mode": mode}
    pairs = runner.fingerprint() | fixed
    return " ".join(f"{key}={value}" for key, value in sorted(pairs.items()))


def _check_transport(settings: ConnectorSettings, new_transport: Callable[[ConnectorSettings], Transport]) -> None:
    from connector.validate import transport_problems

    found = transport_problems(new_transport(settings), settings.side_channel_host)
    if found:
        raise TransportError("; ".join(found))


def _slowed(transport: Transport, settings: EngineSettings) -> Transport:
    if not settings.sim_kv_gbps:
        return transport
    from connector.throttled_transport import ThrottledTransport

    return ThrottledTransport(transport, gbps=settings.sim_kv_gbps)


def _new_runner(settings: EngineSettings, report: Report, *, is_layer_major: bool) -> Runner:
    if settings.engine == "sim":
        from engine.embedded.sim_runner import SimRunner

        return SimRunner(settings, is_layer_major=is_layer_major)
    report(f"loading model {settings.model_path}")
    sleep_while_waiting()
    from engine.embedded.torch_runner import TorchRunner

    return TorchRunner(
        Path(settings.model_path),
        dtype=settings.engine_dtype,
        threads=settings.engine_threads,
        max_model_len=settings.max_model_len,
        is_layer_major=is_layer_major,
    )


def _num_blocks(settings: EngineSettings, runner: Runner) -> int:
    if settings.num_blocks:
        return settings.num_blocks
    block_bytes = runner.block_bytes(settings.block_size)
    num_blocks = settings.kv_cache_bytes // block_bytes
    if num_blocks < 2:
        raise RunnerError(
            f"kv_cache_bytes is {settings.kv_cache_bytes}, a block of {settings.block_size} tokens takes {block_bytes}"
        )
    return num_blocks


def _mooncake(settings: ConnectorSettings) -> Transport:
    from connector.mooncake import MooncakeTransport

    return MooncakeTransport(timeout_s=settings.kv_transport_timeout_s)
