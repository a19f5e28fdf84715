"""The plugin beside one rank's KV memory: vLLM's hooks -> `WorkerHalf`, its results in words of either generation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from connector.layer_count import LayerCount
from connector.transport import Transport
from connector.vllm_plugin.hooks import HookGeneration
from connector.vllm_plugin.memory import regions_of
from connector.vllm_plugin.news import PluginStep, WorkerNews
from connector.vllm_plugin.settings import PluginSettings
from connector.worker_half import WorkerHalf

_IDLE_STEP_S: Final = 0.005
"""vLLM's loop turns all the time while KV is under way. In a process that has nothing else to do it takes the
interpreter's lock away from the threads that move this KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Of one step."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    """Of those received."""
    failed_blocks: frozenset[int] = frozenset()
    """That they were to fill. Only where vLLM is told by block."""


class PluginWorker:
    """Driven by the model's thread. On the network wait `handle_preemptions` and steps that compute nothing."""

    def __init__(
        self, settings: PluginSettings, generation: HookGeneration, *, rank: int, transport: Transport, fingerprint: str
    ) -> None:
        """Binds this rank's side channel. Raises OSError, with the setting to change."""
        connector = settings.connector
        self._settings = settings
        self._generation = generation
        self._rank = rank
        self._has_results = threading.Event()
        try:
            self._half = WorkerHalf(
                connector,
                engine_id=settings.engine_id,
                epoch=settings.epoch,
                host=connector.side_channel_host,
                side_channel_port=connector.side_channel_port,
                rank=rank,
                tp_size=settings.tp_size,
                transport=transport,
                fingerprint=fingerprint,
                on_progress=self._has_results.set,
                num_kv_heads=settings.num_kv_heads,
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"side channel of rank {rank}: {error.strerror or error}. Its port is kv_port + rank, or"
                " pdq_side_channel_port + rank if that is set in kv_connector_extra_config",
            ) from error
        self._layers: frozenset[str] = frozenset()
        path = settings.layer_count_path
        self._layer_count = LayerCount(Path(path)) if path and rank == 0 else None
        self._refused: dict[str, str] = {}
        self._external: dict[str, tuple[int, ...]] = {}
        self._held = Reports()
        """Announced; reported in the next step."""
        self._has_scheduler_news = False
        self._may_wait = False
        self._news = WorkerNews()
        self._is_fatal_told = False

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Raises LayoutError, TransportError."""
        settings = self._settings
        regions = regions_of(
            kv_caches,
            layers=settings.layers,
            num_blocks=settings.num_blocks,
            rank=self._rank,
            tp_size=settings.tp_size,
            num_kv_heads=settings.num_kv_heads,
        )
        self._half.register_kv_caches(regions)
        self._layers = frozenset(region.layer for region in regions)

    def handle_preemptions(self, step: PluginStep) -> None:
        self._half.handle_preemptions(step.meta)

    def bind(self, step: PluginStep) -> None:
        """All of the step comes into force here, loads too: `start_load_kv` comes before the forward or after it,
        depending on the version, and a load, which no forward waits for, has nothing to wait for itself."""
        self._refused |= dict(step.refused)
        self._external |= dict(step.external)
        self._has_scheduler_news = step.has_news
        self._may_wait = step.may_wait
        self._half.bind_connector_metadata(step.meta)
        self._half.start_load_kv()

    def save_kv_layer(self, layer: str) -> None:
        """Layers that share another's KV are ignored."""
        if self._layer_count is not None:
            self._layer_count.add()
        if layer in self._layers:
            self._half.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        self._half.wait_for_save()

    def clear(self) -> None:
        self._half.clear_connector_metadata()

    def take_reports(self) -> Reports:
        """Once a step. Each id once over the worker's life."""
        if self._may_wait and not self._refused and self._held == Reports():
            self._has_results.wait(_IDLE_STEP_S)
        self._has_results.clear()
        results = self._half.get_transfer_results()
        refused, self._refused = self._refused, {}
        failed = results.failed_recving | refused
        received = results.finished_recving | refused.keys()
        reports = Reports(
            sent=results.finished_sending,
            received=received,
            failed=frozenset(failed),
            failed_blocks=frozenset(block for name in failed for block in self._external.get(name, ())),
        )
        for engine_request_id in received:
            self._external.pop(engine_request_id, None)
        fatal, self._is_fatal_told = None if self._is_fatal_told else results.fatal, results.fatal is not None
        self._news = self._news.joined(
            WorkerNews(stats=results.stats, failed=failed, counts=results.counts, fatal=fatal)
        )
        if self._generation.has_stats_after_frees:
            return reports
        reports, self._held = self._held, reports
        ended = dict.fromkeys((*self._held.sent, *self._held.received), 1)
        self._news = replace(self._news, ended=ended)
        return reports

    def take_news(self) -> WorkerNews | None:
        """After `take_reports`. None: nothing happened."""
        news, self._news = self._news, WorkerNews()
        return None if news.is_empty else news

    @property
    def must_report_stats(self) -> bool:
        """The scheduler's side has news that need a worker's report, however empty, to get out."""
        is_ending = bool(self._held.sent or self._held.received)
        return not self._generation.has_stats_after_frees and (self._has_scheduler_news or is_ending)

    def shutdown(self) -> None:
        """Idempotent."""
        self._half.shutdown()
