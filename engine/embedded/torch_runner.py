"""The torch runner: a Hugging Face causal language model on the CPU. Loads torch: import it lazily.

Steps run on one flat row of tokens, see `paged_cache.py`. In float32 greedy output equals the model's own
`generate` token for token at any batch composition; bfloat16 rounds differently from batch to batch and does not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from connector.layout import KvRegion
from engine.embedded.logprobs import num_prompt_rows, token_logprobs
from engine.embedded.paged_cache import PagedCache
from engine.embedded.runner import Chunk, ChunkResult, LayerHook, RunnerError
from engine.embedded.sampling import Sampler
from engine.embedded.step_plan import Geometry, StepPlan, plan_step
from engine.embedded.torch_model import DTYPES, load_model, read_facts
from engine.embedded.weights_digest import weights_digest
from pdq.wire.types import Capability, TokenLogprob

_LAYOUTS: Final = {False: "block.layer.kv.head.slot.dim", True: "layer.block.kv.head.slot.dim"}
"""By `is_layer_major`."""


class TorchRunner:
    """Implements `engine.embedded.runner.Runner`. Keeps no state per request."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        threads: int = 0,
        max_model_len: int = 0,
        is_layer_major: bool = False,
    ) -> None:
        """Loads the model. `threads` is of the whole process, 0 leaves it to torch; `max_model_len` 0: the model's.
        `is_layer_major`: see `paged_cache.py`.

        Raises RunnerError.
        """
        if threads:
            torch.set_num_threads(threads)
        self._is_layer_major = is_layer_major
        self._dtype_name, self._dtype = dtype, DTYPES[dtype]
        self._facts = read_facts(folder)
        if max_model_len > self._facts.context_length:
            raise RunnerError(
                f"max_model_len is {max_model_len}, the model in {folder} has {self._facts.context_length} positions"
            )
        self._max_model_len = max_model_len or self._facts.context_length
        self._digest = weights_digest(folder)
        self._sampler = Sampler(self._facts.eos_token_ids)
        self._geometry: Geometry | None = None
        self._cache: PagedCache | None = None
        # one name per runner: the registry is global, and the function is bound to this runner's cache
        self._attention = f"pdq_paged_{id(self):x}"
        ALL_ATTENTION_FUNCTIONS[self._attention] = self._attend
        self._model = load_model(folder, self._dtype, self._attention)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._facts.eos_token_ids

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    @property
    def num_layers(self) -> int:
        return self._facts.layers

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        found = (Capability.LOGPROBS, Capability.PROMPT_LOGPROBS)
        return (*found, Capability.RESUME_EXACT) if self._dtype_name == "float32" else found

    def block_bytes(self, block_size: int) -> int:
        num_bytes: int = self._shape(block_size).block_elements * self._dtype.itemsize
        return num_bytes

    def allocate(self, num_blocks: int, block_size: int) -> list[KvRegion]:
        assert self._cache is None, "allocate is called once"
        shape = self._shape(block_size)
        self._geometry = replace(shape, layer_blocks=num_blocks) if self._is_layer_major else shape
        try:
            self._cache = PagedCache(self._geometry, num_blocks, self._dtype)
        except RuntimeError as exc:  # torch's out of memory on a CPU
            size = num_blocks * self.block_bytes(block_size)
            raise RunnerError(f"no memory for {num_blocks} KV blocks ({size} bytes): {exc}") from exc
        address, block_bytes = self._cache.pool.data_ptr(), self.block_bytes(block_size)
        if not self._is_layer_major:
            return [KvRegion(layer="all", base_address=address, block_stride_bytes=block_bytes, num_blocks=num_blocks)]
        layer_bytes = block_bytes // shape.layers
        return [
            KvRegion(
                layer=f"model.layers.{layer}",
                base_address=address + layer * num_blocks * layer_bytes,
                block_stride_bytes=layer_bytes,
                num_blocks=num_blocks,
                storage_address=address,
                storage_bytes=num_blocks * block_bytes,
            )
            for layer in range(shape.layers)
        ]

    def run(self, batch: list[Chunk], before_layer: LayerHook, after_layer: LayerHook) -> list[ChunkResult]:
        if not batch:
            return []
        assert self._cache is not None, "allocate comes first"
        assert self._geometry is not None
        with torch.inference_mode():
            plan = plan_step(batch, self._geometry, self._dtype)
            wanted = _wanted_rows(batch, plan)
            self._cache.begin(plan, before_layer, after_layer)
            logits = self._model(
                input_ids=plan.input_ids,
                position_ids=plan.positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.tensor([row for rows in wanted for row in rows], dtype=torch.long),
            ).logits[0]
            return self._results(batch, wanted, logits)

    def fingerprint(self) -> dict[str, str]:
        facts = self._facts
        return {
            "model": facts.architecture,
            "weights": self._digest,
            "dtype": self._dtype_name,
            "layers": str(facts.layers),
            "kv_heads": str(facts.kv_heads),
            "head_dim": str(facts.head_dim),
            "layout": _LAYOUTS[self._is_layer_major],
        }

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        ALL_ATTENTION_FUNCTIONS.pop(self._attention, None)
        self._model = self._cache = None

    def _shape(self, block_size: int) -> Geometry:
        facts = self._facts
        return Geometry(layers=facts.layers, kv_heads=facts.kv_heads, head_dim=facts.head_dim, block_size=block_size)

    def _results(self, batch: list[Chunk], wanted: list[range], logits: torch.Tensor) -> list[ChunkResult]:
        """`logits` has one row for each wanted token, in order."""
        sampling: list[tuple[int, Chunk]] = []
        prompt_logprobs: list[tuple[TokenLogprob, ...]] = []
        row = 0
        for chunk, rows in zip(batch, wanted, strict=True):
            prompt_logprobs.append(_prompt_logprobs(chunk, logits[row : row + len(rows)]))
            row += len(rows)
            if chunk.sample:
                sampling.append((row - 1, chunk))
        last = logits[[row for row, _ in sampling]].float()
        chosen = self._sampler.choose([chunk.sequence for _, chunk in sampling], last)
        of_sampled = iter(range(len(chosen)))
        results = []
        for chunk, of_prompt in zip(batch, prompt_logprobs, strict=True):
            if not chunk.sample:
                results.append(ChunkResult(None, None, of_prompt))
                continue
            index = next(of_sampled)
            logprob, count = None, chunk.sequence.sampling.logprobs
            if count is not None:
                (logprob,) = token_logprobs(last[index : index + 1], [chosen[index]], count)
            results.append(ChunkResult(chosen[index], logprob, of_prompt))
        return results

    def _attend(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        assert self._cache is not None
        return self._cache.attend(*args, **kwargs)


def _wanted_rows(batch: list[Chunk], plan: StepPlan) -> list[range]:
    """Per chunk the tokens of the step whose logits are needed: they cost as much as several layers."""
    wanted = []
    for chunk, first in zip(batch, plan.firsts, strict=True):
        end = first + chunk.num_tokens
        begin = end - 1 if chunk.sample else end
        if (count := num_prompt_rows(chunk)) > 0:
            begin, end = first, end if chunk.sample else first + count
        wanted.append(range(begin, end))
    return wanted


def _prompt_logprobs(chunk: Chunk, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
    count = num_prompt_rows(chunk)
    alternatives = chunk.sequence.sampling.prompt_logprobs
    if count == 0 or alternatives is None:
        return ()
    start = chunk.sequence.num_computed
    return tuple(token_logprobs(logits[:count], chunk.sequence.token_ids[start + 1 : start + 1 + count], alternatives))
