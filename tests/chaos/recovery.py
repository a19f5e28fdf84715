"""How long requests stood still after the worker that had them was struck. Pure.

A request is *affected* by a strike when the struck worker had it at that moment: a prefill worker by the queue's
pending list, a decode worker by what the queue noted at the hand-over, for streams of which the client has seen the
first token. (Prompts that never were in the queue, and those between hand-over and first token, are not counted.)

Its *recovery* is the time from the strike to the end of the longest silence at the client that began before or within
`IN_FLIGHT_S` after the strike: tokens that the victim had sent before it was struck may still arrive, and count as
nothing. A silence ends with a token or with the answer's end. Only streams count: of other answers a client sees the
end alone. Requests whose client left first have no recovery.

Recovery is *undisturbed* when no other strike was begun or still lasted between `APART_S` before it and its end. The
strike at a process that ends lasts until its successor serves.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

IN_FLIGHT_S: Final = 0.3
APART_S: Final = 3.0
BOUNDS_S: Final = (0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    kind: str
    victim: str
    at_s: float
    """Planned."""
    request_id: str
    seconds: float
    is_undisturbed: bool


def recovery_s(struck_at: float, seen_at: Sequence[float]) -> float | None:
    """`seen_at`: when the client saw a token or the end, in order. None: it saw nothing after the strike."""
    later = [struck_at, *seen_at[bisect.bisect_right(seen_at, struck_at) :]]
    silences = [pair for pair in itertools.pairwise(later) if pair[0] <= struck_at + IN_FLIGHT_S]
    if not silences:
        return None
    return max(silences, key=lambda pair: pair[1] - pair[0])[1] - struck_at


def is_apart(begin: float, end: float, others: Sequence[tuple[float, float]]) -> bool:
    """`others`: (begin, end) of the other strikes."""
    return all(other_end < begin - APART_S or other_begin > end for other_begin, other_end in others)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of all values don't exceed; 0.0 when there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def histogram(values: Sequence[float], bounds: Sequence[float] = BOUNDS_S) -> list[tuple[float, int]]:
    """(upper bound, how many are above the bound before and not above this one); the last bound is infinite."""
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect.bisect_left(bounds, value)] += 1
    return list(zip((*bounds, math.inf), counts, strict=True))
