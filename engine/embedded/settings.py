"""Sizes and limits of an engine, and the simulated device's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One worker's engine. P and D of a model need the same engine, model, block size and KV layout."""

    engine: Literal["sim", "torch", "vllm"] = field(
        default="sim",
        metadata={"help": "sim: no model, echoes the prompt from checked KV bytes; torch: a model on CPU; vllm"},
    )
    model_path: str = field(default="", metadata={"internal": True})
    """torch: folder of the model, ready to be opened."""
    engine_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "torch: type of weights and KV; bfloat16 is not exact between batches"}
    )
    engine_threads: int = field(
        default=0, metadata={"help": "torch and vllm on a CPU: threads of one step; 0: they decide"}
    )
    engine_start_s: float = field(
        default=180.0, metadata={"help": "give an engine up that isn't ready after this time"}
    )
    engine_stop_s: float = field(
        default=5.0, metadata={"help": "kill an engine that hasn't ended this time after stop"}
    )
    block_size: int = field(default=16, metadata={"help": "tokens per KV block"})
    num_blocks: int = field(default=0, metadata={"help": "KV blocks; 0: as many as kv_cache_bytes hold"})
    kv_cache_bytes: int = field(default=256 * 1024 * 1024, metadata={"help": "KV memory when num_blocks is 0"})
    max_model_len: int = field(
        default=0, metadata={"help": "longest prompt + output in tokens; 0: as the model and the KV memory allow"}
    )
    max_num_batched_tokens: int = field(default=2048, metadata={"help": "most tokens computed in one step"})
    max_num_seqs: int = field(default=256, metadata={"help": "most requests that run or load KV at once"})
    watermark_blocks: int = field(
        default=0, metadata={"help": "blocks kept free at admission, for running requests to grow; 0: 1 % of the pool"}
    )
    prefix_caching: bool = field(default=True, metadata={"help": "keep full blocks findable after their request ended"})

    sim_layers: int = field(default=4, metadata={"help": "sim: layers"})
    sim_kv_bytes_per_token: int = field(
        default=1024, metadata={"help": "sim: KV size of a token over all layers; a multiple of 8 per layer"}
    )
    sim_max_model_len: int = field(default=131072, metadata={"help": "sim: the model's context length"})
    sim_key: str = field(default="pdq", metadata={"help": "sim: key of the block contents; equal on P and D"})
    sim_verify_blocks: int = field(
        default=16,
        metadata={"help": "sim: blocks of decoding requests checked again per step, beside the fixed checks"},
    )
    sim_prefill_ms: float = field(default=0.0, metadata={"help": "sim: time of a prefill chunk, fixed part"})
    sim_prefill_token_ms: float = field(default=0.0, metadata={"help": "sim: ... and per token"})
    sim_prefill_square_ms: float = field(default=0.0, metadata={"help": "sim: ... and per token squared (attention)"})
    sim_decode_ms: float = field(default=0.0, metadata={"help": "sim: time of a step with decodes, fixed part"})
    sim_decode_sequence_ms: float = field(default=0.0, metadata={"help": "sim: ... and per decoding request"})
    sim_decode_context_ms: float = field(
        default=0.0, metadata={"help": "sim: ... and per token in the decoding requests' contexts"}
    )
    sim_kv_gbps: float = field(
        default=0.0, metadata={"help": "sim: KV moves no faster than this many Gbit/s; 0: as fast as the transport"}
    )
    sim_directives: bool = field(
        default=False, metadata={"help": "sim: obey !eos=K, !crash and !slow=MS at a prompt's start (tests)"}
    )

    def __post_init__(self) -> None:
        least_one = ("block_size", "max_num_batched_tokens", "max_num_seqs", "sim_layers", "sim_kv_bytes_per_token")
        for name in least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not decode every running request"
            )
