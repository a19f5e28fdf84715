"""A prefill worker finds the formula of its own prefill times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.prefill_time import PrefillTime
from prefill_worker.prefill_times import PrefillTimes, fit

TRUE = PrefillTime(fixed_ms=1.475, token_ms=0.018492, square_ms=5.474e-7)


def test_the_fit_finds_the_formula_through_noise() -> None:
    rng = random.Random(0)
    lengths = [round(10 ** rng.uniform(2, 5)) for _ in range(200)]

    found = fit([(n, TRUE.ms(n) * rng.lognormvariate(0, 0.05)) for n in lengths])

    assert found is not None
    for num_tokens in (100, 1000, 10_000, 100_000):
        assert found.ms(num_tokens) == pytest.approx(TRUE.ms(num_tokens), rel=0.05)


def test_prompts_of_one_length_give_a_time_per_token() -> None:
    found = fit([(300, 30.0)] * 5)

    assert found == PrefillTime(fixed_ms=0, token_ms=pytest.approx(0.1), square_ms=0)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(0.01, 1e6)), min_size=1, max_size=50))
def test_no_part_is_ever_negative_and_some_time_is_left(samples: list[tuple[int, float]]) -> None:
    found = fit(samples)

    assert found is not None
    assert min(found.fixed_ms, found.token_ms, found.square_ms) >= 0
    assert found.ms(1000) > 0


def test_a_prompt_that_waited_for_the_one_before_counts_from_its_end() -> None:
    times = PrefillTimes()

    for number in range(4):  # all submitted at 1.0, 100 ms each
        times.ended(1000, submitted_at=1.0, now=1.1 + number / 10)

    assert times.formula is not None
    assert times.formula.ms(1000) == pytest.approx(100)


def test_cached_prompts_and_the_first_two_say_nothing() -> None:
    times = PrefillTimes()

    times.ended(1000, submitted_at=0.0, now=0.1)
    times.ended(1000, submitted_at=0.1, now=0.2)
    times.ended(0, submitted_at=0.2, now=0.3)

    assert times.formula is None


def test_a_worker_that_gets_slower_says_so_after_200_prompts() -> None:
    times, now = PrefillTimes(), 0.0
    for seconds in [0.1] * 250 + [0.3] * 210:
        times.ended(1000, submitted_at=now, now=now + seconds)
        now += seconds

    assert times.formula is not None
    assert times.formula.ms(1000) == pytest.approx(300)
