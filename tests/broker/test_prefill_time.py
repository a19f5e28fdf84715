"""The formula of a prefill's time as text, and the median over workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.prefill_time import PrefillTime, median_ms, parse_prefill_time

PARTS = st.floats(0, 1e6)


@given(fixed=PARTS, token=PARTS, square=PARTS)
def test_a_formula_survives_its_text_to_six_digits(fixed: float, token: float, square: float) -> None:
    time = PrefillTime(fixed_ms=fixed, token_ms=token, square_ms=square)

    parsed = parse_prefill_time(str(time))

    if fixed + token + square == 0:
        assert parsed is None
    else:
        assert parsed is not None
        assert parsed.ms(1000) == pytest.approx(time.ms(1000), rel=1e-5)


@given(st.text())
def test_no_text_is_a_fault(text: str) -> None:
    parse_prefill_time(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fixed_ms=1",
        "fixed_ms=1 token_ms=x square_ms=0",
        "fixed_ms=nan token_ms=1 square_ms=0",
        "fixed_ms=-1 token_ms=1 square_ms=0",
        "fixed_ms=0 token_ms=0 square_ms=0",
    ],
)
def test_what_is_no_formula_is_no_estimate(text: str) -> None:
    assert parse_prefill_time(text) is None


def test_one_slow_worker_does_not_move_the_estimate() -> None:
    fast = PrefillTime(fixed_ms=1, token_ms=0.01, square_ms=0)
    slow = PrefillTime(fixed_ms=100, token_ms=5, square_ms=0)

    assert median_ms([slow, fast, fast], 1000) == pytest.approx(11)
    assert median_ms([], 1000) == 0


@given(fixed=PARTS, token=PARTS, square=PARTS, limit_ms=st.floats(0, 1e6))
def test_tokens_within_a_limit_take_the_limit(fixed: float, token: float, square: float, limit_ms: float) -> None:
    time = PrefillTime(fixed_ms=fixed, token_ms=token, square_ms=square)

    tokens = time.tokens_within(limit_ms)

    if fixed >= limit_ms:
        assert tokens == 0
    elif max(token, square) > 1e-9:
        assert fixed + (token + square * tokens) * tokens == pytest.approx(limit_ms, rel=1e-6, abs=1e-6)
