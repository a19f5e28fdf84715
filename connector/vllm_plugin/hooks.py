"""What the plugin relies on in vLLM, and how its two generations of hooks differ. Pure: facts about a version come in.

`Facts` are names only: class -> method -> parameters, or class -> None -> fields. They come from an installed vLLM
(`facts_of`), or from a version's source, by `tests/connector_plugin/record_hooks.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

Facts = Mapping[str, Mapping[str, Sequence[str]]]
"""Class name -> hook -> its parameters without self; data classes have one entry `fields`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookGeneration:
    """All that differs between versions of vLLM. The plugin asks here, nowhere else."""

    name: str
    has_failed_recving: bool
    """Failed loads are named by request in `get_transfer_results`; else by block in `get_block_ids_with_load_errors`,
    and `get_finished` reports the rest."""
    has_stats_after_frees: bool
    """The scheduler half's news are asked for in each step, after blocks were freed. Else before, and only when a
    worker half has news too: then ends are announced one step before they are reported, so that both meet."""
    head_major_layout: str
    """What vLLM calls blocks whose heads are contiguous cells."""


CURRENT: Final = HookGeneration(
    name="0.32", has_failed_recving=True, has_stats_after_frees=True, head_major_layout="LBHNC"
)
FORMER: Final = HookGeneration(
    name="0.23", has_failed_recving=False, has_stats_after_frees=False, head_major_layout="HND"
)

_BASE: Final = "KVConnectorBase_V1"
_BOTH: Final[Facts] = {
    _BASE: {
        "__init__": ("vllm_config", "role", "kv_cache_config"),
        "bind_connector_metadata": ("connector_metadata",),
        "clear_connector_metadata": (),
        "register_kv_caches": ("kv_caches",),
        "handle_preemptions": ("kv_connector_metadata",),
        "start_load_kv": ("forward_context", "**kwargs"),
        "wait_for_layer_load": ("layer_name",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "**kwargs"),
        "wait_for_save": (),
        "get_block_ids_with_load_errors": (),
        "shutdown": (),
        "get_kv_connector_stats": (),
        "build_connector_worker_meta": (),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "on_new_request": ("request",),
        "update_connector_output": ("connector_output",),
        "get_required_kvcache_layout": ("vllm_config",),
        "requires_piecewise_for_cudagraph": ("extra_config",),
        "get_finished_count": (),
        "build_kv_connector_stats": ("data",),
        "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    },
    "SupportsHMA": {"request_finished_all_groups": ("request", "block_ids")},
    "KVConnectorWorkerMetadata": {"aggregate": ("other",)},
    "KVConnectorStats": {
        "fields": ("data",),
        "aggregate": ("other",),
        "reduce": (),
        "is_empty": (),
    },
    "KVConnectorPromMetrics": {
        "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        "observe": ("transfer_stats_data", "engine_idx"),
    },
    "SchedulerOutput": {
        "fields": (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "kv_connector_metadata",
        )
    },
    "NewRequestData": {"fields": ("req_id", "block_ids", "num_computed_tokens")},
    "CachedRequestData": {"fields": ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens")},
    "KVConnectorOutput": {"fields": ("finished_sending", "finished_recving", "kv_connector_worker_meta")},
    "KVCacheBlocks": {"get_block_ids": ()},
    "KVCacheGroupSpec": {"fields": ("layer_names", "kv_cache_spec")},
    "KVCacheConfig": {"fields": ("num_blocks", "kv_cache_groups")},
    "KVTransferConfig": {
        "fields": ("engine_id", "kv_role", "kv_port", "kv_connector_extra_config", "kv_load_failure_policy")
    },
}
_OF_GENERATION: Final[Mapping[str, Facts]] = {
    CURRENT.name: {
        _BASE: {
            "get_transfer_results": ("finished_req_ids",),
            "get_loaded_kv_cache_group_ids": ("request",),
            "has_pending_push_work": (),
            "has_pending_block_frees": (),
        },
        "KVConnectorTransferResults": {"fields": ("finished_sending", "finished_recving", "failed_recving")},
        "KVConnectorOutput": {"fields": ("failed_recving",)},
        "SchedulerOutput": {"fields": ("has_sync_kv_loads",)},
    },
    FORMER.name: {
        _BASE: {"get_finished": ("finished_req_ids",)},
        "KVConnectorOutput": {"fields": ("invalid_block_ids",)},
    },
}
_CALLED_HERE: Final = frozenset({"KVCacheBlocks"})
"""The plugin calls these, so that further parameters with defaults do no harm. All others vLLM calls."""
LEFT_ALONE: Final = frozenset(
    {
        # Called by some version of vLLM. The plugin has nothing to say there, or says it where it can.
        "bind_gpu_block_pool",
        "bind_kv_cache_manager",
        "finish_forward",
        "get_aligned_num_cpu_blocks",
        "get_external_cache_hit_sources",
        "get_handshake_metadata",
        "get_kv_connector_kv_cache_events",
        "get_mem_pool_context",
        "has_connector_metadata",
        "prefer_cross_layer_blocks",
        "register_cross_layers_kv_cache",
        "register_finished_partial_tail",
        "request_finished",
        "requires_kv_delivery",
        "reset_cache",
        "reset_capture_state",
        "restore_kv_caches",
        "role",
        "set_host_xfer_buffer_ops",
        "set_xfer_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "supports_divergent_local_hybrid_hits",
        "supports_sleep_mode",
        "take_events",
        "unregister_kv_caches",
    }
)
"""Hooks that are known and not relied on, so that a new one stands out."""


def generation_of(facts: Facts) -> HookGeneration:
    return CURRENT if "get_transfer_results" in facts.get(_BASE, {}) else FORMER


def misfits(facts: Facts, version: str, *, only: Collection[str] | None = None) -> list[str]:
    """What of `_BOTH` and of its generation this version lacks or calls otherwise; each says where to look.

    `only`: of these classes; None: of all.
    """
    found = []
    generation = generation_of(facts)
    for needed in (_BOTH, _OF_GENERATION[generation.name]):
        for owner, hooks in needed.items():
            if only is not None and owner not in only:
                continue
            there = facts.get(owner)
            if there is None:
                found.append(f"vLLM {version} has no class {owner}")
                continue
            for hook, parameters in hooks.items():
                takes = there.get(hook)
                if takes is not None and owner in _CALLED_HERE:
                    takes = takes[: len(parameters)]
                found += _misfit(f"vLLM {version}: {owner}", hook, parameters, takes)
    return found


def _misfit(where: str, hook: str, needed: Sequence[str], there: Sequence[str] | None) -> list[str]:
    if there is None:
        return [f"{where} has no {hook}({', '.join(needed)})"]
    if hook == "fields":
        return [f"{where} has no field {name}" for name in needed if name not in there]
    if list(there) == list(needed):
        return []
    return [f"{where}.{hook} takes ({', '.join(there)}), the plugin expects ({', '.join(needed)})"]


def unknown_hooks(facts: Facts, called: Sequence[str]) -> list[str]:
    """Of the hooks that a version calls on a connector: those that this table has never heard of."""
    known = set(_BOTH[_BASE]) | set(_BOTH["SupportsHMA"]) | LEFT_ALONE
    for generation in _OF_GENERATION.values():
        known |= set(generation[_BASE])
    return sorted(name for name in called if name not in known)


def facts_of(*classes: type[Any]) -> dict[str, dict[str, list[str]]]:
    """Of classes that are imported."""
    facts: dict[str, dict[str, list[str]]] = {}
    for owner in classes:
        hooks = {
            name: _parameters(inspect.getattr_static(owner, name))
            for name in dir(owner)
            if callable(getattr(owner, name, None)) and (not name.startswith("__") or name == "__init__")
        }
        if is_dataclass(owner):
            hooks["fields"] = [field.name for field in fields(owner)]
        facts[owner.__name__] = hooks
    return facts


def _parameters(hook: Any) -> list[str]:
    function = getattr(hook, "__func__", hook)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(parameter.kind, "") + parameter.name for parameter in parameters]
    return names if isinstance(hook, staticmethod) else names[1:]
