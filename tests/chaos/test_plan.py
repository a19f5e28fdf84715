"""A seed says all that a chaos run can repeat."""

from __future__ import annotations

import pytest

from tests.chaos import plan
from tests.chaos.plan import TAKES_A_WORKER, Kind


def test_a_seed_has_one_plan_and_another_seed_another():
    assert plan.strikes(1, 300) == plan.strikes(1, 300)
    assert plan.strikes(1, 300) != plan.strikes(2, 300)


def test_a_longer_run_begins_like_a_shorter_one():
    short, long = plan.strikes(3, 60), plan.strikes(3, 300)

    assert short == long[: len(short)]
    assert len(long) > 2 * len(short)


def test_every_kind_of_strike_comes_in_a_long_run():
    assert {strike.kind for strike in plan.strikes(1, 1000)} == set(Kind)


def test_only_the_kinds_that_were_asked_for_come():
    assert {strike.kind for strike in plan.strikes(1, 300, [Kind.KILL, Kind.CUT_REDIS])} == {Kind.KILL, Kind.CUT_REDIS}


@pytest.mark.parametrize("seed", range(5))
def test_what_hangs_is_not_struck_and_all_is_over_before_the_end(seed: int):
    hangs_until: dict[str, float] = {}
    for strike in plan.strikes(seed, 600):
        assert strike.at_s >= hangs_until.get(strike.victim, 0.0)
        hangs_until[strike.victim] = strike.at_s + strike.lasts_s
        assert strike.at_s + strike.lasts_s <= 600


def test_some_strikes_at_workers_come_alone():
    planned = plan.strikes(1, 600)
    alone = [
        strike
        for before, strike, after in zip(planned, planned[1:], planned[2:], strict=False)
        if strike.at_s - before.at_s - before.lasts_s > 2 and after.at_s - strike.at_s - strike.lasts_s > 2
    ]

    assert len([strike for strike in alone if strike.kind in TAKES_A_WORKER]) > 10


def test_a_client_asks_the_same_again():
    assert plan.ask(1, 2, 3) == plan.ask(1, 2, 3)
    asks = {plan.ask(seed, client, turn) for seed in (1, 2) for client in (1, 2) for turn in (1, 2)}

    assert len(asks) == 8


def test_what_is_expected_ends_before_the_stop_string():
    asks = [plan.ask(1, client, turn) for client in range(1, 17) for turn in range(1, 30)]

    assert any(ask.stop is not None and ask.stop in ask.prompt[: ask.max_tokens] for ask in asks)
    assert all(ask.stop is None or ask.stop not in ask.expected for ask in asks)
    assert all(ask.prompt.startswith(ask.expected) for ask in asks)
