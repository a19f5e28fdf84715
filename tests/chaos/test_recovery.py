"""What counts as recovery after a strike."""

from __future__ import annotations

import math

from tests.chaos.recovery import histogram, is_apart, quantile, recovery_s


def test_recovery_ends_with_the_first_token_after_the_silence():
    assert recovery_s(10.0, [9.0, 9.9, 12.5, 12.6]) == 2.5


def test_tokens_that_were_on_their_way_are_no_recovery():
    assert recovery_s(10.0, [9.9, 10.1, 10.2, 13.0, 13.1, 20.0]) == 3.0


def test_a_later_silence_is_another_matter():
    assert recovery_s(10.0, [9.9, 10.5, 11.0, 19.0]) == 0.5


def test_who_saw_nothing_more_has_no_recovery():
    assert recovery_s(10.0, [9.0, 10.0]) is None


def test_strikes_that_overlap_or_come_shortly_before_disturb():
    assert is_apart(10.0, 12.0, [(5.0, 6.9), (12.1, 13.0)])
    assert not is_apart(10.0, 12.0, [(5.0, 7.0)])
    assert not is_apart(10.0, 12.0, [(11.9, 13.0)])


def test_quantiles_are_values_that_occurred():
    values = [float(n) for n in range(1, 101)]

    assert [quantile(values, part) for part in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([], 0.5) == 0.0


def test_the_histogram_counts_every_value_once():
    assert histogram([0.05, 0.1, 0.2, 7.0], (0.1, 1.0)) == [(0.1, 2), (1.0, 1), (math.inf, 1)]
