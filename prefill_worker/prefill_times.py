"""What this worker's prefills took, and the formula that fits them. Pure: times come in.

The engine computes prompts one after the other, so a prefill took the time from its submission, or from the end of the
one before it when that was later. Tokens found in the prefix cache cost nothing and are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from broker.prefill_time import PrefillTime

_KEPT: Final = 200
_LEAST: Final = 3
_EACH_UNTIL: Final = 20
_EVERY: Final = 10
"""A fit takes some 0.3 ms: each sample has its own at first, later only every tenth."""
_BETTER: Final = 0.999
"""A formula with more parts, or with a stranger one, must be better than rounding errors."""
_SHAPES: Final = ((1,), (0, 1), (1, 2), (0, 1, 2), (2,), (0, 2), (0,))
"""Powers of n, the most natural first."""

Sample = tuple[int, float]
"""Tokens, milliseconds; both above 0."""


class PrefillTimes:
    """The last 200. `formula` may be read from other threads."""

    def __init__(self) -> None:
        self.formula: PrefillTime | None = None
        """None until three prefills have ended."""
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._num_seen = 0
        self._last_end = 0.0

    def ended(self, num_tokens: int, *, submitted_at: float, now: float) -> None:
        """`num_tokens` were computed. Times in monotonic seconds."""
        took_ms = (now - max(submitted_at, self._last_end)) * 1000
        self._last_end = now
        if num_tokens <= 0 or took_ms <= 0:
            return
        self._samples.append((num_tokens, took_ms))
        self._num_seen += 1
        if self._num_seen >= _LEAST and (self._num_seen <= _EACH_UNTIL or self._num_seen % _EVERY == 0):
            self.formula = fit(self._samples)


def fit(samples: Sequence[Sample]) -> PrefillTime | None:
    """Least squares of the relative errors with no negative part; None without samples.

    With three parts all shapes can be tried: the best one without a negative part is the answer.
    """
    if not samples:
        return None
    scale = float(max(num_tokens for num_tokens, _ in samples))
    rows = [(1 / ms, num_tokens / scale / ms, (num_tokens / scale) ** 2 / ms) for num_tokens, ms in samples]
    products = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    best, least = (0.0, 0.0, 0.0), float(len(rows))
    for shape in _SHAPES:
        solved = _solve([[products[i][j] for j in shape] for i in shape], [sums[i] for i in shape])
        if solved is None or min(solved) < 0:
            continue
        parts = dict(zip(shape, solved, strict=True))
        values = (parts.get(0, 0.0), parts.get(1, 0.0), parts.get(2, 0.0))
        error = sum((sum(v * x for v, x in zip(values, row, strict=True)) - 1) ** 2 for row in rows)
        if error < least * _BETTER - 1e-12:
            best, least = values, error
    fixed, token, square = best
    return PrefillTime(fixed_ms=fixed, token_ms=token / scale, square_ms=square / scale**2)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots; None when the equations don't tell the unknowns apart (all prompts of one length)."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    largest = max(abs(value) for row in matrix for value in row)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if abs(rows[pivot][column]) <= largest * 1e-9:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
