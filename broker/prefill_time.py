"""How long a prefill takes by its number of tokens: what prefill workers publish and gateways estimate with. Pure.

A worker's registry record carries its formula as text. The estimate of a prompt is the median over the workers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """fixed + token * n + square * n^2 milliseconds for n tokens; no part is negative."""

    fixed_ms: float
    token_ms: float
    square_ms: float

    def ms(self, num_tokens: int) -> float:
        return self.fixed_ms + (self.token_ms + self.square_ms * num_tokens) * num_tokens

    def tokens_within(self, limit_ms: float) -> float:
        """How many tokens take so long; at least 0, infinite when tokens cost nothing."""
        left_ms = limit_ms - self.fixed_ms
        if left_ms <= 0:
            return 0.0
        # the usual root, turned round so that it also holds for square_ms = 0
        divisor = self.token_ms + math.sqrt(self.token_ms**2 + 4 * self.square_ms * left_ms)
        return 2 * left_ms / divisor if divisor > 0 else math.inf

    def __str__(self) -> str:
        return f"fixed_ms={self.fixed_ms:.6g} token_ms={self.token_ms:.6g} square_ms={self.square_ms:.6g}"


def parse_prefill_time(text: str) -> PrefillTime | None:
    """None for an empty text, and for one that this version can't read: an estimate is never worth a fault."""
    try:
        values = {name: float(value) for name, value in (pair.split("=") for pair in text.split())}
        time = PrefillTime(fixed_ms=values["fixed_ms"], token_ms=values["token_ms"], square_ms=values["square_ms"])
    except (KeyError, ValueError):
        return None
    parts = (time.fixed_ms, time.token_ms, time.square_ms)
    return time if all(math.isfinite(part) and part >= 0 for part in parts) and sum(parts) > 0 else None


def median_ms(times: Iterable[PrefillTime], num_tokens: int) -> float:
    """0 when nobody has said anything."""
    return statistics.median([time.ms(num_tokens) for time in times] or [0.0])
