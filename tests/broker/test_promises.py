"""Tokens promised to a decode worker count until its own record counts them."""

from __future__ import annotations

import pytest

from broker.base import WorkerRecord
from broker.promises import Promises


def record(clock_ms: int, worker_id: str = "d1") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, role="decode", state="ready", endpoint="", model="m", fingerprint="", clock_ms=clock_ms
    )


def test_a_promise_counts_while_it_is_asked_and_until_a_record_is_no_older_than_the_acceptance() -> None:
    promises = Promises()
    with promises.make("d1", 100) as promise:
        assert promises.totals([record(10)]) == {"d1": 100}
        promise.keep(25)

    assert promises.totals([record(20)]) == {"d1": 100}, "a new look at the registry, but a record from before"
    assert promises.totals([record(25)]) == {}
    assert promises.totals([record(20)]) == {}, "forgotten for good"


def test_a_promise_that_was_not_taken_is_withdrawn_also_when_the_question_fails() -> None:
    promises = Promises()
    with promises.make("d1", 100):
        pass
    with pytest.raises(TimeoutError), promises.make("d1", 100):
        raise TimeoutError

    assert promises.totals([record(10)]) == {}


def test_promises_of_a_worker_add_up_and_end_with_the_worker() -> None:
    promises = Promises()
    for tokens, accepted_ms in ((100, 30), (10, 50)):
        with promises.make("d1", tokens) as promise:
            promise.keep(accepted_ms)

    assert promises.totals([record(20), record(99, "d2")]) == {"d1": 110}
    assert promises.totals([record(40)]) == {"d1": 10}
    assert promises.totals([record(40, "d2")]) == {}
    assert promises.totals([record(40)]) == {}
