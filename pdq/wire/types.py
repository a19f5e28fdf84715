"""Values that cross a process border on both the queue side and the engine side. Data only.

Token ids travel as little-endian uint32 bytes (`pack_ids`): 70 times cheaper to encode than a list.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_TOKEN_ID: Final = 2**32 - 1


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or block ids as little-endian uint32. Raises OverflowError outside 0..2**32-1."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises ValueError when the length is no multiple of 4."""
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def num_ids(data: bytes) -> int:
    """How many ids `pack_ids` put into these bytes."""
    return len(data) // 4


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pair:
    """Which try of a request this is, ordered: the gateway mints `gen`, each take from the queue mints `attempt`."""

    gen: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.gen}.{self.attempt}"


class Capability(StrEnum):
    """What an engine may or may not be able to do for a request. Words of the registry."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    STRUCTURED_OUTPUTS = "structured_outputs"
    RESUME_EXACT = "resume_exact"
    """Continuing from generated ids gives what an undisturbed run would have given."""


class FormatKind(StrEnum):
    """What an answer's text must conform to. Names as in vLLM's StructuredOutputsParams."""

    JSON = "json"
    """`text` is a JSON schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    CHOICE = "choice"
    """`text` is a JSON list of strings; the answer is one of them."""
    GRAMMAR = "grammar"
    """`text` is a context-free grammar as the engine's backend reads it (llguidance: Lark)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    kind: FormatKind
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings as in vLLM's SamplingParams; `None` means off."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    """How many alternatives to report per generated token; 0 reports the chosen token only."""
    prompt_logprobs: int | None = None
    """The same per prompt position; computed by P, since D never sees the prompt's logits."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    output_format: OutputFormat | None = None
    """Rules from D's first token on; P, whose token nobody sees, needs none."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log probability of one chosen (or given) token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTicket:
    """Where a finished prefill's KV blocks are, so that D can read them.

    `transfer_id` is the request id: made by the gateway, never reused; with `pair` it names one transfer.
    Rank r of the engine listens on side-channel port `port + r`. Block i holds tokens i*block_size .. of the prompt.
    """

    transfer_id: str
    pair: Pair
    engine_id: str
    epoch: str
    """Random per engine process start: a restarted engine never answers for blocks of the former one."""
    host: str
    port: int
    tp_size: int
    block_size: int
    num_tokens: int
    block_ids: bytes
    """`pack_ids` of the block table, ceil(num_tokens / block_size) entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """The prefill engine that will push KV: known before it computes anything, so that D can tell it where to write.

    Rank r listens on side-channel port `port + r`.
    """

    engine_id: str
    epoch: str
    host: str
    port: int
    tp_size: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What moving one request's KV cost, as seen by the side that moved it."""

    num_bytes: int
    num_descriptors: int
    seconds: float
    hidden_seconds: float = 0.0
    """Push: of these, the time before the prefill had ended; nobody waited for it."""
