"""What a session asks for: the commands that the hub carries out. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker.messages import DecodeStats
from pdq.wire.types import Pair, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The decode worker that has Go, and for which pair."""

    worker: str
    endpoint: str
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueue:
    """Put the request into the queue as `gen`, continuing after `generated_ids`."""

    gen: int
    generated_ids: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCancel:
    gen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCancel:
    """Tell this decode worker to stop the request up to and including `pair`."""

    owner: Owner
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """These tokens are from a pair that has no right to answer: tell their sender to stop."""

    pair: Pair


class Emit(NamedTuple):
    """New tokens for the client, never repeated, never changed. (A named tuple: one per step and request.)"""

    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] | None
    stop_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Terminal: `stop` or `length`."""

    reason: str
    stats: DecodeStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Terminal. `code` is a key of gateway.errors.HTTP_STATUS."""

    code: str
    message: str


Command = Enqueue | QueueCancel | SendCancel | Refuse | Emit | Finish | Fail
