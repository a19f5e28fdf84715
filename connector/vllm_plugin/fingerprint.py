"""What must be equal on two vLLM engines for one to read the other's blocks, as readable `key=value` pairs."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from typing import Any, Final

_PROTOCOL: Final = "1"
"""Of the connectors' messages; raised when they no longer understand each other."""
_MOONCAKE: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine",
)
_NOT_THE_MODEL: Final = ("_name_or_path", "transformers_version", "auto_map")


def fingerprint_of(vllm_config: Any, *, block_size: int = 0) -> str:
    """Sorted. `block_size`: of the KV cache group, where it is known; 0: the configured one. Needs vLLM and torch."""
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    kv_dtype = str(cache.cache_dtype)
    dtype = str(model.dtype).removeprefix("torch.")
    pairs = {
        "block_size": str(block_size or cache.block_size),
        "config": _digest(model.hf_config.to_dict()),
        "connector": _PROTOCOL,
        "dtype": dtype,
        "engine": "vllm",
        "head_size": str(model.get_head_size()),
        "isa": _isa(),
        "kv_dtype": dtype if kv_dtype == "auto" else kv_dtype,
        "kv_heads": "mla" if model.use_mla else str(model.get_total_num_kv_heads()),
        "mooncake": _mooncake_version(),
        "revision": str(model.revision or "-"),
        "speculative": _speculative(vllm_config.speculative_config),
        "tp": str(parallel.tensor_parallel_size),
        "vllm": vllm.__version__,
    }
    return " ".join(f"{key}={''.join(value.split())}" for key, value in sorted(pairs.items()))


def _digest(config: dict[str, Any]) -> str:
    """Of the model's shape; the path it was loaded from may differ."""
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _speculative(config: Any) -> str:
    return "-" if config is None else f"{config.method}-{config.num_speculative_tokens}"


def _isa() -> str:
    """The inside of a block depends on the vector width that the attention kernel was chosen for."""
    import torch

    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}{'-amx' if has_amx else ''}"


def _mooncake_version() -> str:
    for name in _MOONCAKE:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
