"""The connector as a vLLM plugin: vLLM's hooks, handed on to `vllm_plugin.scheduler` and `.worker`.

    --kv-transfer-config '{"kv_connector": "PdqMooncakeConnector", "kv_connector_module_path": "connector.plugin",
                           "kv_role": "kv_producer", "kv_port": 14579}'

`PdqMooncakeLayerwiseConnector` pushes each layer while the prefill computes, and serves pull requests as well.
Importing this module needs vLLM and starts nothing: the API process uses the classes without instances of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.sched import output as step_output
from vllm.v1.outputs import KVConnectorOutput

from connector.vllm_plugin.hooks import facts_of, generation_of, misfits
from connector.vllm_plugin.logs import log_through_vllm
from connector.vllm_plugin.metrics import PdqPromMetrics, PdqStats, stats_for_log
from connector.vllm_plugin.news import PluginStep, WorkerNews
from connector.vllm_plugin.scheduler import PluginScheduler
from connector.vllm_plugin.settings import PluginSettings, plugin_settings
from connector.vllm_plugin.worker import PluginWorker, Reports

_FACTS = facts_of(
    base.KVConnectorBase_V1,
    base.SupportsHMA,
    base.KVConnectorWorkerMetadata,
    *([base.KVConnectorTransferResults] if hasattr(base, "KVConnectorTransferResults") else []),
    KVConnectorStats,
    KVConnectorPromMetrics,
    KVConnectorOutput,
    step_output.SchedulerOutput,
    step_output.NewRequestData,
    step_output.CachedRequestData,
)
GENERATION = generation_of(_FACTS)
if _found := misfits(_FACTS, vllm.__version__, only=_FACTS):
    raise ImportError("this vLLM's connector hooks are not those that pdq knows: " + "; ".join(_found))


@dataclass
class PdqStep(base.KVConnectorMetadata):  # type: ignore[misc]
    step: PluginStep


@dataclass
class PdqWorkerNews(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    news: WorkerNews = field(default_factory=WorkerNews)

    def aggregate(self, other: PdqWorkerNews) -> PdqWorkerNews:
        return PdqWorkerNews(self.news.joined(other.news))


class PdqMooncakeConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """Pull: D reads the KV of a finished prefill."""

    _can_push = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ValueError for a configuration that can't work, OSError when the side channel's port is taken."""
        super().__init__(vllm_config, role, kv_cache_config)
        from vllm.utils.network_utils import get_ip

        log_through_vllm()
        settings = plugin_settings(vllm_config, kv_cache_config, host=get_ip())
        self._scheduler: PluginScheduler | None = None
        self._worker: PluginWorker | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            self._scheduler = PluginScheduler(settings, GENERATION, can_push=self._can_push)
        else:
            self._worker = self.new_worker(vllm_config, settings)

    # Beside the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._of_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PdqStep:
        return PdqStep(self._of_scheduler.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        sent_up = connector_output.kv_connector_worker_meta
        news = sent_up.news if isinstance(sent_up, PdqWorkerNews) else None
        self._of_scheduler.update_connector_output(connector_output, news)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._of_scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self._of_scheduler.has_pending_block_frees()

    # Beside the KV memory.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: PdqStep) -> None:
        self._of_worker.handle_preemptions(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: PdqStep) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._of_worker.bind(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: see `PluginWorker.bind`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._of_worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        self._of_worker.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        reports = self._of_worker.take_reports()
        return base.KVConnectorTransferResults(
            finished_sending=set(reports.sent),
            finished_recving=set(reports.received),
            failed_recving=set(reports.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """What versions without `get_transfer_results` ask."""
        self._reports = self._of_worker.take_reports()
        return set(self._reports.sent) or None, set(self._reports.received) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Empty where `get_transfer_results` names the requests."""
        reports, self._reports = self._reports, Reports()
        return set(reports.failed_blocks)

    def build_connector_worker_meta(self) -> PdqWorkerNews | None:
        news = self._of_worker.take_news()
        return None if news is None else PdqWorkerNews(news)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._of_worker.clear()

    # On both sides.

    def get_kv_connector_stats(self) -> PdqStats | None:
        if self._worker is not None:
            return PdqStats() if self._worker.must_report_stats else None
        news = self._of_scheduler.take_news()
        return PdqStats(data=news) if news else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.shutdown()

    # Without an instance.

    @classmethod
    def new_worker(cls, vllm_config: Any, settings: PluginSettings) -> PluginWorker:
        """Of this process's rank. A subclass may choose another transport. Raises OSError, TransportError."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from connector.mooncake import MooncakeTransport
        from connector.vllm_plugin.fingerprint import fingerprint_of

        return PluginWorker(
            settings,
            GENERATION,
            rank=get_tensor_model_parallel_rank(),
            transport=MooncakeTransport(timeout_s=settings.connector.kv_transport_timeout_s),
            fingerprint=fingerprint_of(vllm_config, block_size=settings.block_size),
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None if vllm_config.model_config.use_mla else GENERATION.head_major_layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return cls._can_push

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """No: the KV memory stays registered, peers may read it at any time."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdqStats:
        return stats_for_log(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PdqPromMetrics:
        return PdqPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    _reports = Reports()

    @property
    def _of_scheduler(self) -> PluginScheduler:
        assert self._scheduler is not None, "a scheduler's hook was called in a worker"
        return self._scheduler

    @property
    def _of_worker(self) -> PluginWorker:
        assert self._worker is not None, "a worker's hook was called beside the scheduler"
        return self._worker


class PdqMooncakeLayerwiseConnector(PdqMooncakeConnector):
    """Push: P writes each layer into D's blocks while it computes; pull requests are served too."""

    _can_push = True


def register() -> None:
    """Entry point of `vllm.general_plugins`: makes both classes known by name. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for connector in (PdqMooncakeConnector, PdqMooncakeLayerwiseConnector):
        if connector.__name__ not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(connector.__name__, __name__, connector.__name__)
