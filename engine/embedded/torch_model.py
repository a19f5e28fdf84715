"""Loads a causal language model for the torch runner and says what it is. Loads torch: import it lazily."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.embedded.runner import RunnerError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the runner has to know of a model's configuration."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]


def read_facts(folder: Path) -> ModelFacts:
    """Reads config.json and generation_config.json. Raises RunnerError for a model that the paged KV doesn't fit."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError) as exc:
        raise RunnerError(f"can't read the model in {folder}: {exc}") from exc
    if kinds := _other_attention(config):
        raise RunnerError(
            f"{folder}: the torch runner computes plain full attention only; this {config.model_type} model has "
            f"{', '.join(sorted(kinds))}"
        )
    heads = config.num_attention_heads
    return ModelFacts(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(folder, config),
    )


def load_model(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """The model in evaluation mode, its weights mapped from the file where their type is `dtype` already.

    `attention` names a registered attention function. Raises RunnerError.
    """
    transformers_logging.disable_progress_bar()  # this process's output is a log
    transformers_logging.set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, MemoryError) as exc:
        raise RunnerError(f"can't load the model in {folder}: {exc}") from exc
    if not getattr(model, "_supports_attention_backend", False):
        raise RunnerError(f"{folder}: {type(model).__name__} doesn't let its attention be replaced; use another model")
    return model.eval()


def _other_attention(config: Any) -> set[str]:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if getattr(config, "kv_lora_rank", None):
        kinds.add("compressed_kv")
    # without layer_types a window, where the model uses one, is for all layers
    has_types = getattr(config, "layer_types", None) is not None
    if not has_types and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        kinds.add("sliding_attention")
    return kinds


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    eos = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
