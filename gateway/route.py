"""Which way a request's prefill goes, and why. Pure."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pdq.wire.types import SamplingParams


class Way(Enum):
    LOCAL = "local"
    """A decode worker prefills by itself: no queue, no transfer."""
    PULL = "pull"
    PUSH = "push"


class Route(NamedTuple):
    way: Way
    reason: str
    """A metric's label: `mode`, `short_prompt`, `prompt_logprobs`, `decode_busy`."""


def choose_route(mode: Way, *, num_tokens: int, local_max_tokens: int, sampling: SamplingParams) -> Route:
    """Short prompts are not worth a hand-over. Log probabilities of the prompt come from prefill workers only."""
    queued = Way.PULL if mode is Way.LOCAL else mode
    if sampling.prompt_logprobs is not None:
        return Route(queued, "prompt_logprobs" if mode is Way.LOCAL else "mode")
    if mode is Way.LOCAL:
        return Route(Way.LOCAL, "mode")
    if num_tokens < local_max_tokens:
        return Route(Way.LOCAL, "short_prompt")
    return Route(queued, "mode")
