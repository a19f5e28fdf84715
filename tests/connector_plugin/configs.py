"""vLLM's configuration objects as the plugin sees them: attribute names only."""

from __future__ import annotations

from types import SimpleNamespace as Values
from typing import Any


def vllm_config(
    *,
    role: str = "kv_both",
    port: int = 14579,
    engine_id: str = "engine-1",
    extra: dict[str, Any] | None = None,
    tp_size: int = 1,
    device: str = "cpu",
    num_kv_heads: int = 4,
    use_mla: bool = False,
    **parallel: int,
) -> Any:
    return Values(
        instance_id="abcde",
        kv_transfer_config=Values(
            kv_role=role,
            kv_port=port,
            engine_id=engine_id,
            kv_connector_extra_config=extra or {},
            is_kv_producer=role != "kv_consumer",
        ),
        parallel_config=Values(**({"tensor_parallel_size": tp_size, "pipeline_parallel_size": 1} | parallel)),
        device_config=Values(device_type=device),
        model_config=Values(use_mla=use_mla, get_total_num_kv_heads=lambda: num_kv_heads),
    )


def kv_cache_config(
    *, layers: tuple[str, ...] = ("l0", "l1"), block_size: int = 4, num_blocks: int = 32, num_groups: int = 1
) -> Any:
    spec = type("FullAttentionSpec", (), {"block_size": block_size})()
    groups = [Values(layer_names=list(layers), kv_cache_spec=spec) for _ in range(num_groups)]
    return Values(num_blocks=num_blocks, kv_cache_groups=groups, transfer_group_ids=tuple(range(num_groups)))
