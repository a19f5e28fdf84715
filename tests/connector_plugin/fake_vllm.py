"""The few modules of vLLM that the plugin imports, in either generation: base classes, values, nothing that runs.

Signatures are vLLM's; that they are is checked by the plugin itself, which refuses to load with others.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

_PLUGIN = ("connector.plugin", "connector.vllm_plugin.metrics")
VERSIONS = {"current": "0.32.0", "former": "0.23.0"}


@contextmanager
def fake_vllm(generation: str) -> Iterator[ModuleType]:
    """The plugin's module, loaded over it. What is called `vllm` outside stays untouched."""
    fakes = {module.__name__: module for module in _modules(generation)}
    before = {
        name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm" or name in _PLUGIN
    }
    for name in before:
        del sys.modules[name]
    sys.modules.update(fakes)
    try:
        yield importlib.import_module("connector.plugin")
    finally:
        for name in (*fakes, *_PLUGIN):
            sys.modules.pop(name, None)
        sys.modules.update(before)
        for name in _PLUGIN:  # the package keeps a reference of its own
            package = sys.modules["connector"]
            if name in before:
                setattr(package, name.rpartition(".")[2], before[name])
            elif hasattr(package, name.rpartition(".")[2]):
                delattr(package, name.rpartition(".")[2])


def _modules(generation: str) -> list[ModuleType]:
    kv = "vllm.distributed.kv_transfer.kv_connector"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": VERSIONS[generation]},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.distributed.kv_transfer": {},
        kv: {},
        f"{kv}.factory": {"KVConnectorFactory": new_factory()},
        f"{kv}.v1": {},
        f"{kv}.v1.base": _base(generation),
        f"{kv}.v1.metrics": {"KVConnectorStats": KVConnectorStats, "KVConnectorPromMetrics": KVConnectorPromMetrics},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {
            "SchedulerOutput": SchedulerOutput,
            "NewRequestData": NewRequestData,
            "CachedRequestData": CachedRequestData,
        },
        "vllm.v1.outputs": {"KVConnectorOutput": KVConnectorOutput},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, values in contents.items():
        vars(modules[name]).update(values, __path__=[])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
    return list(modules.values())


def _base(generation: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "SupportsHMA": SupportsHMA,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
    }
    if generation == "former":
        return values | {"KVConnectorBase_V1": FormerBase}
    return values | {"KVConnectorBase_V1": CurrentBase, "KVConnectorTransferResults": KVConnectorTransferResults}


def new_factory() -> type[Any]:
    class KVConnectorFactory:
        _registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012

        @classmethod
        def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
            if name in cls._registry:
                raise ValueError(f"{name} is registered")
            cls._registry[name] = module_path, class_name

    return KVConnectorFactory


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    def aggregate(self, other: Any) -> Any: ...


class SupportsHMA:
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Any:
        raise NotImplementedError

    def reduce(self) -> Any:
        raise NotImplementedError

    def is_empty(self) -> bool:
        raise NotImplementedError


class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        pass

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        raise NotImplementedError


@dataclass
class NewRequestData:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None = None
    kv_connector_metadata: Any = None
    has_sync_kv_loads: bool = False


@dataclass
class KVConnectorOutput:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class FormerBase:
    """As in 0.23."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def register_kv_caches(self, kv_caches: Any) -> None: ...

    def handle_preemptions(self, kv_connector_metadata: Any) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def shutdown(self) -> None: ...

    def get_kv_connector_stats(self) -> Any: ...

    def build_connector_worker_meta(self) -> Any: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    def on_new_request(self, request: Any) -> None: ...

    def update_connector_output(self, connector_output: Any) -> None: ...

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None: ...

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Any) -> bool:
        return False

    def get_finished_count(self) -> int | None: ...

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any: ...

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any: ...


class CurrentBase(FormerBase):
    """As in 0.32."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any: ...

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False


CurrentBase.__name__ = FormerBase.__name__ = "KVConnectorBase_V1"
