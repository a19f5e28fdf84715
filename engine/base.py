"""The engine port: what a worker needs of an engine, and the values that cross it.

Adapters: `engine/embedded` (its own process; runners `torch` and `sim`) and `engine/vllm`.
Token ids in, token ids out: an engine knows neither text nor HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from pdq.wire.types import Capability, KvSource, KvTicket, Pair, SamplingParams, TokenLogprob, TransferStats

FINAL_ERRORS: Final = frozenset({"invalid_output_format"})
"""Codes of `EngineOutput.error` that say that the request is wrong: no other engine would take it."""


class EngineError(Exception):
    """The engine can't start, or is gone. The worker gives its jobs back and stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOnly:
    """Compute the prompt's KV, discard the sampled token, hold the blocks until the reader is done or `release`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushKv:
    """As PrefillOnly, but write each computed layer into D's blocks as soon as D has said where they are.

    `prefilled` comes when the compute has ended, without a ticket; `released` after everything was written and
    acknowledged (or given up). D may say where its blocks are before or after the compute: late is no error.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveKv:
    """The prompt's KV is being computed at P, which will write it into this request's blocks."""

    source: KvSource


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKv:
    """The prompt's KV is at P: read it before decoding."""

    ticket: KvTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """`engine_request_id` is unique per (request, pair): a higher pair is a new request with new blocks."""

    engine_request_id: str
    request_id: str
    pair: Pair
    prompt_ids: bytes
    generated_ids: bytes
    """Already generated ids, counted by penalties and by min/max_tokens as generated; the KV covers both."""
    sampling: SamplingParams
    kv: PrefillOnly | LoadKv | PushKv | ReceiveKv | None
    """None: prefill and decode here (local mode, tests)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step, or a few joined ones, did for one request. After `finish` or `error` nothing more comes for it."""

    engine_request_id: str
    token_ids: bytes = b""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish: str | None = None
    """`stop` (EOS or a stop token, which is the last of token_ids), `length`, or `prefilled` (PrefillOnly)."""
    stop_token_id: int | None = None
    error: str | None = None
    """`code: detail`. `kv_transfer_failed`, `engine_error`, `unsupported` (a capability that this engine hasn't):
    retryable elsewhere; those of FINAL_ERRORS are not."""
    ticket: KvTicket | None = None
    """With `prefilled`."""
    cached_tokens: int = 0
    """With `finish`: prompt tokens found in the local prefix cache."""
    transfer: TransferStats | None = None
    """With `finish` at D: what was read from P."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    step: int
    """A counter that moves while the engine makes progress, also inside a long step; not a number of steps."""
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    """Not started, or waiting for remote KV."""
    pinned: int
    """Finished prefills whose blocks a reader may still need."""
    num_preemptions: int = 0
    """Since the start: how often a request's blocks were taken away for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """One engine step, or a few joined ones when the worker was behind.

    Also sent without outputs when blocks were released, and at least once a second.
    """

    outputs: tuple[EngineOutput, ...]
    released: tuple[str, ...]
    """engine_request_ids whose blocks are free again, each exactly once, also after error and abort."""
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Known once the engine has started."""

    engine_id: str
    epoch: str
    block_size: int
    total_blocks: int
    max_model_len: int
    kv_source: KvSource
    """Where this engine's side channel listens; named in Reserve."""
    fingerprint: str
    """Readable `key=value` pairs of all that must be equal on P and D."""
    capabilities: tuple[Capability, ...]


class Engine(Protocol):
    async def start(self) -> EngineInfo:
        """Raises EngineError with what to change."""

    async def submit(self, request: EngineRequest) -> None: ...

    def outputs(self) -> AsyncIterator[StepOutputs]:
        """One item per step; ends after `stop`, raises EngineError when the engine process dies."""

    async def abort(self, engine_request_id: str) -> None:
        """Any state, also unknown or finished.

        No output follows; `released` does, once no peer can touch the blocks.
        """

    async def release(self, engine_request_id: str) -> None:
        """A finished prefill that nobody will read: free its blocks as soon as no reader is active."""

    async def stop(self) -> None: ...
