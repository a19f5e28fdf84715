"""Converts a GGUF file (llama architecture) into a Hugging Face folder.

Weights are de-quantised to float32, which keeps their exact values: a 4-bit block is float16 scale * q + float16
offset, and neither float16 nor bfloat16 holds every such sum. 540 MB for SmolLM2-135M.

GGUF stores the rows of q and k in another order than Hugging Face: rotary embedding there pairs neighbouring rows,
here row i with row i + head_dim / 2. `unpermute_rows` undoes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.models.errors import ModelError, Progress
from engine.models.gguf_tokenizer import write_tokenizer

_TOP_LEVEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(source: Path, folder: Path, on_progress: Progress) -> None:
    """Writes model.safetensors, config.json, generation_config.json and the tokenizer files into `folder`.

    Raises ModelError when the file is no GGUF file, or of a kind this converter doesn't know.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as exc:
        raise ModelError(f"{source} is not a readable GGUF file: {exc}") from exc
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise ModelError(
            f"{source} has architecture {meta.get('general.architecture')!r}; only 'llama' can be converted. "
            "Use a Hugging Face folder instead."
        )
    config = _config(meta)
    has_head = any(tensor.name == "output.weight" for tensor in reader.tensors)
    config["tie_word_embeddings"] = not has_head
    _write_weights(reader.tensors, config, folder / "model.safetensors", on_progress)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config},
    )
    write_tokenizer(meta, folder)
    on_progress("tokenizer", 1, 1)


def unpermute_rows(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k from GGUF's order (pairs next to each other) to Hugging Face's (halves of each head)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    if unsupported := sorted(key for key in meta if key.startswith("llama.rope.scaling.") or "expert" in key):
        raise ModelError(f"can't convert a model with {', '.join(unsupported)}")
    try:
        hidden_size = int(meta["llama.embedding_length"])
        num_heads = int(meta["llama.attention.head_count"])
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": int(meta["llama.feed_forward_length"]),
            "num_hidden_layers": int(meta["llama.block_count"]),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(meta.get("llama.attention.head_count_kv", num_heads)),
            "head_dim": int(meta.get("llama.attention.key_length", hidden_size // num_heads)),
            "max_position_embeddings": int(meta["llama.context_length"]),
            "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0)),
            "vocab_size": int(meta.get("llama.vocab_size", len(meta["tokenizer.ggml.tokens"]))),
            "attention_bias": False,
            "mlp_bias": False,
            **{
                key: int(meta[name])
                for key, name in (
                    ("bos_token_id", "tokenizer.ggml.bos_token_id"),
                    ("eos_token_id", "tokenizer.ggml.eos_token_id"),
                    ("pad_token_id", "tokenizer.ggml.padding_token_id"),
                )
                if name in meta
            },
        }
    except KeyError as exc:
        raise ModelError(f"the GGUF file lacks {exc}") from exc


def _shortest(value: float) -> float:
    """A float32 read from the file as the decimal number that it was written from: 9.99999975e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _write_weights(tensors: list[Any], config: dict[str, Any], target: Path, on_progress: Progress) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(tensors, start=1):
        name, kind = _weight_name(tensor.name)
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if kind in heads:
            weight = unpermute_rows(weight, heads[kind])
        weights[name] = np.ascontiguousarray(weight)
        on_progress("convert", done, len(tensors))
    total = sum(weight.nbytes for weight in weights.values())
    on_progress("write", 0, total)
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod(0o644)  # save_file makes it private, other files of a model folder are not
    with target.open("rb+") as written:  # the folder's rename must not outlive its content in a power cut
        os.fsync(written.fileno())
    on_progress("write", total, total)


def _weight_name(name: str) -> tuple[str, str]:
    """(Hugging Face name, GGUF name without the layer). Raises ModelError for a tensor with no counterpart."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name], name
    layer, _, kind = name.removeprefix("blk.").partition(".")
    if not layer.isdigit() or kind not in _PER_LAYER:
        raise ModelError(f"can't convert the tensor {name}: no counterpart in a Hugging Face llama model")
    return f"model.layers.{layer}.{_PER_LAYER[kind]}", kind


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
