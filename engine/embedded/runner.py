"""The runner port: what computes one step over the paged KV memory, inside the engine process.

The scheduler owns a `TokenSequence` per request and changes it between steps; a runner reads it during `run` and
keeps what it needs per request (generator, counts, hash chain) in `runner_data`, which dies with the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from connector.layout import KvRegion
from pdq.wire.types import Capability, SamplingParams, TokenLogprob

LayerHook = Callable[[int], None]
"""Called with the layer's index, 0 .. num_layers - 1."""


class RunnerError(Exception):
    """The runner can't be built or can't run: bad model, not enough memory. The text says what to change."""


@dataclass(slots=True, kw_only=True, eq=False)
class TokenSequence:
    """One request's tokens and where their KV is. Runners read it only, except `runner_data`."""

    engine_request_id: str
    token_ids: list[int]
    """All ids so far: prompt, ids generated elsewhere before (a migrated request), ids generated here."""
    num_prompt_tokens: int
    """How many of `token_ids` are the prompt; all later ones are generated, for penalties and min_tokens."""
    sampling: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    """The block table: position p is slot p % block_size of block block_ids[p // block_size]."""
    num_computed: int = 0
    """Positions 0 .. num_computed - 1 have their KV in the blocks."""
    num_preemptions: int = 0
    """Raised when the blocks were taken away; what was known about block contents is void then."""
    runner_data: object | None = None


class Chunk(NamedTuple):
    """One request's part of a step: compute positions num_computed .. num_computed + num_tokens - 1.

    Blocks for these positions are in the block table. `num_computed` is raised after `run`, by the scheduler.
    """

    sequence: TokenSequence
    num_tokens: int
    sample: bool
    """The chunk ends at the last known token: sample the next one."""


class ChunkResult(NamedTuple):
    """`token_id` is None when the chunk didn't sample.

    `logprob` is set when `sampling.logprobs` is. `prompt_logprobs` is set when `sampling.prompt_logprobs` is:
    one entry for each position q with start < q <= start + num_tokens and q < num_prompt_tokens, that is for the
    prompt tokens that this chunk's logits predict. (Position 0 has none. The scheduler joins chunks; it never
    skips prompt positions by prefix hits for such requests.)
    """

    token_id: int | None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


NOT_SAMPLED = ChunkResult(None)


class Runner(Protocol):
    """One per rank, built by its adapter with all settings. Only the engine loop's thread calls it."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Ids from here on are refused before they reach `run`."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def capabilities(self) -> tuple[Capability, ...]: ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers; turns `kv_cache_bytes` into a number of blocks."""
        ...

    def allocate(self, num_blocks: int, block_size: int) -> list[KvRegion]:
        """Makes the paged KV memory, once. Raises RunnerError when it doesn't fit."""
        ...

    def run(self, batch: list[Chunk], before_layer: LayerHook, after_layer: LayerHook) -> list[ChunkResult]:
        """Computes the chunks, writes their KV, samples; one result per chunk, in order.

        Per layer: `before_layer(i)` before its KV is read, `after_layer(i)` when all its KV of this step is written.
        """
        ...

    def fingerprint(self) -> dict[str, str]:
        """All that must be equal on P and D for KV bytes to mean the same: model, dtype, layers, heads, layout."""
        ...

    def close(self) -> None: ...
