"""P's pins, case by case. Random sequences are in test_laws.py."""

from __future__ import annotations

import pytest

from connector.pins import Pins
from connector.transfers import IllegalTransition, Outcome, TransferKey
from pdq.wire.types import Pair

KEY = TransferKey(transfer_id="r1", pair=Pair(gen=1, attempt=1))
RANK_0 = frozenset({0})


@pytest.fixture
def pins() -> Pins:
    """One pin, held since 0. Leases last 10, holds 60."""
    made = Pins(lease_s=10.0, hold_s=60.0)
    made.expect("e1", KEY)
    made.prefilled("e1", 0.0)
    return made


def freed(pins: Pins) -> list[tuple[str, str]]:
    return [(pin.engine_request_id, pin.cause) for pin in pins.take_freed()]


def done(pins: Pins, consumer: str, outcome: Outcome, now: float, ranks: frozenset[int] = RANK_0) -> None:
    pins.done(KEY, consumer, ranks, RANK_0, outcome, now)


def test_a_hold_ends_after_its_time(pins: Pins):
    pins.expire(59.9)
    assert freed(pins) == []
    pins.expire(60.0)
    assert freed(pins) == [("e1", "no reader came")]


def test_the_first_renewal_replaces_the_hold_by_a_lease(pins: Pins):
    assert pins.renew(KEY, "d", 1.0) is None
    pins.expire(11.0)
    assert freed(pins) == [("e1", "lease expired")]


def test_a_repeated_done_changes_nothing(pins: Pins):
    pins.claim(KEY, "d", 0, 1.0)
    for now in (2.0, 2.1, 2.2):
        done(pins, "d", Outcome.OK, now)
    assert freed(pins) == [("e1", "was read")]


def test_a_failed_reader_leaves_the_blocks_to_the_end_of_its_lease(pins: Pins):
    pins.claim(KEY, "d", 0, 1.0)
    done(pins, "d", Outcome.FAILED, 2.0)
    assert pins.claim(KEY, "other", 0, 3.0) is None
    done(pins, "other", Outcome.OK, 4.0)
    assert freed(pins) == [("e1", "was read")]


def test_a_reader_that_fails_before_it_claims_does_not_end_the_hold(pins: Pins):
    done(pins, "d", Outcome.FAILED, 2.0)
    pins.expire(59.0)
    assert freed(pins) == []


def test_one_reader_that_cancels_leaves_the_blocks_to_the_other(pins: Pins):
    pins.renew(KEY, "d1", 1.0)
    pins.renew(KEY, "d2", 1.0)
    done(pins, "d1", Outcome.CANCELLED, 2.0)
    assert freed(pins) == []
    done(pins, "d2", Outcome.CANCELLED, 3.0)
    assert freed(pins) == [("e1", "reader cancelled")]


def test_a_release_waits_for_the_claim_and_lets_nobody_else_in(pins: Pins):
    pins.claim(KEY, "d", 0, 1.0)
    pins.release("e1", 2.0)
    assert freed(pins) == []
    assert pins.claim(KEY, "other", 0, 2.5) == "released"
    assert pins.renew(KEY, "other", 2.5) == "released"
    assert pins.renew(KEY, "d", 2.5) is None
    assert pins.verify(KEY, "d", 0, 1, 3.0) is None
    done(pins, "d", Outcome.OK, 4.0)
    assert freed(pins) == [("e1", "released")]


def test_verify_is_refused_once_the_lease_has_ended(pins: Pins):
    pins.claim(KEY, "d", 0, 1.0)
    assert pins.verify(KEY, "d", 0, 1, 11.0) == "lease expired"


def test_a_repeated_verify_gets_its_answer_again(pins: Pins):
    assert pins.verify(KEY, "d", 0, 7, 1.0) is None
    done(pins, "d", Outcome.OK, 1.0)

    assert pins.verify(KEY, "d", 0, 7, 2.0) is None


def test_a_second_load_of_the_same_reader_is_not_verified_by_the_first_ones_answer(pins: Pins):
    assert pins.verify(KEY, "d", 0, 7, 1.0) is None
    done(pins, "d", Outcome.OK, 1.0)

    assert pins.verify(KEY, "d", 0, 8, 2.0) == "was read"


def test_tombstones_last_two_leases(pins: Pins):
    pins.release("e1", 1.0)
    pins.expire(20.9)
    assert pins.claim(KEY, "d", 0, 20.9) == "released"
    pins.expire(21.0)
    assert pins.claim(KEY, "d", 0, 21.0) == "unknown"


def test_all_ranks_of_a_reader_have_to_be_done():
    pins = Pins(lease_s=10.0, hold_s=60.0)
    pins.expect("e1", KEY)
    pins.prefilled("e1", 0.0)
    both = frozenset({0, 1})
    for rank in both:
        assert pins.claim(KEY, "d", rank, 1.0) is None

    pins.done(KEY, "d", {1}, both, Outcome.OK, 2.0)
    pins.done(KEY, "d", {1}, both, Outcome.OK, 2.1)
    assert freed(pins) == []
    pins.done(KEY, "d", {0}, both, Outcome.OK, 3.0)
    assert freed(pins) == [("e1", "was read")]


def test_a_reader_that_renews_before_the_prefill_has_ended_gets_its_lease():
    pins = Pins(lease_s=10.0, hold_s=60.0)
    pins.expect("e1", KEY)
    assert pins.renew(KEY, "d", 1.0) is None
    pins.prefilled("e1", 2.0)
    pins.expire(11.0)
    assert freed(pins) == [("e1", "lease expired")]


def test_the_engine_can_not_contradict_itself(pins: Pins):
    with pytest.raises(IllegalTransition):
        pins.expect("e1", KEY)
    with pytest.raises(IllegalTransition):
        pins.prefilled("e1", 1.0)
    with pytest.raises(IllegalTransition):
        pins.forget("e1", 1.0)
    with pytest.raises(IllegalTransition):
        pins.prefilled("nobody", 1.0)
