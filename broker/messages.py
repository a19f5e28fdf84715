"""Every notice between gateways, prefill workers (P) and decode workers (D). Data only; design.md section 6.

| message | from -> to | answer |
|---|---|---|
| Reserve (push) | P -> D | Accepted, Busy, Gone |
| KvReady (pull; statistics in push) | P -> D | Accepted, Busy, Gone |
| Start (local) | gateway -> D | Accepted, Busy, Gone |
| Room | D -> P that was told Busy | - |
| Admit | D -> gateway | Go, Gone |
| Cancel | gateway or P -> P, D | Cancelled |
| Failed | P, D, reaper -> gateway | Ack |
| PromptLogprobs | P -> gateway | Ack |
| Deltas | D -> gateway | DeltasAck (cumulative, not one per frame) |
| Probe | any -> any | Alive |

Evolution: fields may only be added, with a default; readers ignore fields they don't know.
`pair` is in every message about a request: a message from an older pair is dropped and answered Gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdq.wire.types import KvSource, KvTicket, Pair, SamplingParams, TokenLogprob, TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """P will push this prompt's KV while it computes: will you take it, and decode it then?

    Accepted means a place in D's queue, not that the blocks exist: that comes from connector to connector.
    """

    request_id: str
    pair: Pair
    remaining_s: float
    prompt_ids: bytes
    generated_ids: bytes
    sampling: SamplingParams
    source: KvSource
    gateway: str
    gateway_id: str
    prefill_worker: str
    prefill_endpoint: str
    queue_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Prefill and decode this yourself (local mode): no prefill worker, no queue entry."""

    request_id: str
    pair: Pair
    remaining_s: float
    prompt_ids: bytes
    generated_ids: bytes
    sampling: SamplingParams
    gateway: str
    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvReady:
    """The prefill has ended and P holds the KV: will you decode it? In push, after Reserve: what the prefill took."""

    request_id: str
    pair: Pair
    remaining_s: float
    """Until the request's deadline; absolute times exist in Redis only."""
    prompt_ids: bytes
    generated_ids: bytes
    """Tokens that the client has already (a migrated request); D goes on after them."""
    sampling: SamplingParams
    ticket: KvTicket | None
    """None in push: the KV is at D already, or on its way."""
    gateway: str
    """Endpoint of the gateway's inbox."""
    gateway_id: str
    prefill_worker: str
    prefill_endpoint: str
    """Endpoint of P's inbox, for Room."""
    queue_wait_s: float
    prefill_s: float
    cached_tokens: int
    """Prompt tokens that P had in its prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    request_id: str
    pair: Pair
    clock_ms: int = 0
    """By D's own clock: records that are no older count this request (`WorkerRecord.clock_ms`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """No room now. `free_tokens` lets P wait for, or look for, enough room."""

    request_id: str
    pair: Pair
    free_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """To a P that was told Busy: offer again what you have parked."""

    worker: str
    free_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """This pair has no right to go on: drop it and free its KV.

    It was cancelled, has expired, was answered, or a higher pair exists.
    """

    request_id: str
    pair: Pair
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """May `worker` answer this request as this pair? Idempotent: the same worker and pair get Go again."""

    request_id: str
    pair: Pair
    worker: str
    endpoint: str
    """Endpoint of the worker's inbox, for Cancel."""
    prefill_worker: str
    queue_wait_s: float
    prefill_s: float
    cached_tokens: int
    frame: int = 0
    """Of D's link to this gateway: from this frame on `Deltas.owes` knows of the request. 0: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    request_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop this request up to and including `pair`, whatever it is doing."""

    request_id: str
    pair: Pair
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    request_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """This pair will not produce an answer. Retryable: the gateway may enqueue gen + 1."""

    request_id: str
    pair: Pair
    worker: str
    code: str
    """Stable snake_case word: `kv_transfer_failed`, `engine_error`, `deadline_exceeded`, `max_attempts`, ..."""
    detail: str
    retryable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """One entry per prompt position; the first position has none. Sent before KvReady."""

    request_id: str
    pair: Pair
    positions: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    request_id: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """In a request's last delta: what the decode side saw."""

    cached_tokens: int
    """Prompt tokens found in D's own prefix cache."""
    prefill_cached_tokens: int | None = None
    """Push: prompt tokens that P had in its prefix cache."""
    prefill_s: float | None = None
    """Push: known only after Admit."""
    transfer: TransferStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New token ids of one request. `seq` is the index of the first of them among the tokens generated by this pair."""

    request_id: str
    pair: Pair
    seq: int
    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: str | None = None
    """`stop`, `length`, or None while it goes on. A failure is a Failed message, never a finish."""
    stop_token_id: int | None = None
    """The token that ended it (EOS or of stop_token_ids); it is the last of token_ids."""
    stats: DecodeStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """One engine step's news for one gateway, or an idle sign of life (no items).

    Numbered per (D process, gateway process).
    """

    worker: str
    frame: int
    """1, 2, ... without gaps; kept by D until acknowledged."""
    step: int
    """Engine step counter: a D that owes tokens and whose counter stands still is stalled."""
    items: tuple[Delta, ...]
    oldest: int = 1
    """What is below was acknowledged or given up and will never come: where a new receiver starts."""
    owes: tuple[str, ...] | None = None
    """About once a second: ids of all requests that D has open for this gateway. Who is missing has no worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltasAck:
    """All frames up to and including `frame` were taken over."""

    worker: str
    frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Are you alive? Answered by the inbox itself."""

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    worker: str


Notice = (
    Reserve
    | KvReady
    | Start
    | Accepted
    | Busy
    | Room
    | Gone
    | Admit
    | Go
    | Cancel
    | Cancelled
    | Failed
    | PromptLogprobs
    | Ack
    | Deltas
    | DeltasAck
    | Probe
    | Alive
)
