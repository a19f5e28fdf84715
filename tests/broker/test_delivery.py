"""Lease arithmetic, due times and the choice of a decode worker."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base import WorkerRecord
from broker.delivery import (
    PRIORITY_LIMIT,
    QueueSettings,
    Verdict,
    after_failure,
    is_expired,
    ms_to_due,
    tenant_cost_ms,
    tenant_start_ms,
)
from broker.placement import PlacementSettings, choose, free_tokens, load_tokens

SETTINGS = QueueSettings()


def decode_worker(name: str, *, free: int, total: int = 1000, **changes: str) -> WorkerRecord:
    values: dict[str, str] = {"role": "decode", "state": "ready"} | changes
    return WorkerRecord(
        worker_id=name,
        endpoint="tcp://127.0.0.1:1",
        model="m",
        fingerprint="f",
        total_blocks=total,
        free_blocks=free,
        block_size=16,
        **values,
    )


def test_due_is_three_times_the_estimate_and_ten_seconds_a_priority_level() -> None:
    assert ms_to_due(0, 1000, SETTINGS) == 3000
    assert ms_to_due(1, 1000, SETTINGS) == 13_000
    assert ms_to_due(-(10**9), 0, SETTINGS) == -PRIORITY_LIMIT * 10_000


def test_an_estimate_of_the_workers_counts_instead_of_the_setting() -> None:
    assert ms_to_due(0, 1000, SETTINGS, prefill_ms=20.0) == 60


@given(short=st.integers(1, 10**6), long=st.integers(1, 10**6), gap_ms=st.integers(0, 10**8))
def test_a_job_is_overtaken_only_by_those_that_come_within_its_own_slack(short: int, long: int, gap_ms: int) -> None:
    is_overtaken = gap_ms + ms_to_due(0, short, SETTINGS) < ms_to_due(0, long, SETTINGS)

    if is_overtaken:
        assert gap_ms < 3 * long


@given(num_jobs=st.integers(1, 200), tokens=st.integers(1, 5000))
def test_a_tenant_is_never_held_back_by_more_than_the_bound(num_jobs: int, tokens: int) -> None:
    virtual, now = None, 5000.0
    for _ in range(num_jobs):
        start = tenant_start_ms(now, virtual, SETTINGS)
        assert now <= start <= now + SETTINGS.tenant_debt_s * 1000
        virtual = start + tenant_cost_ms(tokens, SETTINGS)


def test_the_third_failure_is_the_last() -> None:
    assert [after_failure(number, SETTINGS) for number in (1, 2, 3, 4)] == [
        Verdict.PUT_BACK,
        Verdict.PUT_BACK,
        Verdict.DEAD_LETTER,
        Verdict.DEAD_LETTER,
    ]


def test_a_lease_runs_out_after_its_time() -> None:
    assert not is_expired(0, 5999, SETTINGS)
    assert is_expired(0, 6000, SETTINGS)


@pytest.mark.parametrize("changes", [{"lease_s": -1.0}, {"max_failures": 0}, {"reap_batch": 0}])
def test_senseless_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        QueueSettings(**changes)  # type: ignore[arg-type]


def test_the_least_loaded_worker_with_room_is_chosen() -> None:
    workers = [decode_worker("full", free=10), decode_worker("half", free=500), decode_worker("idle", free=1000)]

    chosen = choose(workers, 400, {}, random.Random(1))
    chosen_with_promises = choose(workers, 400, {"idle": 15_900}, random.Random(1))

    assert chosen is not None
    assert chosen.worker_id == "idle"
    assert chosen_with_promises is not None
    assert chosen_with_promises.worker_id == "half"


def test_workers_that_drain_start_or_do_not_decode_are_left_out() -> None:
    workers = [
        decode_worker("draining", free=900, state="draining"),
        decode_worker("starting", free=900, state="starting"),
        decode_worker("prefill", free=900, role="prefill"),
    ]

    assert choose(workers, 1, {}, random.Random(1)) is None


def test_equal_workers_are_all_used() -> None:
    workers = [decode_worker(f"d{number}", free=1000 - number) for number in range(4)]
    rng = random.Random(3)

    chosen = {worker.worker_id for _ in range(100) if (worker := choose(workers, 16, {}, rng)) is not None}

    assert len(chosen) >= 3


@given(
    free=st.lists(st.integers(0, 1000), max_size=8),
    promises=st.lists(st.integers(0, 16_000), min_size=8, max_size=8),
    tokens=st.integers(1, 16_000),
    seed=st.integers(0, 1000),
)
def test_a_chosen_worker_has_room_and_is_near_the_least_load_or_is_the_roomiest(
    free: list[int], promises: list[int], tokens: int, seed: int
) -> None:
    workers = [decode_worker(f"d{number}", free=blocks) for number, blocks in enumerate(free)]
    promised = {f"d{number}": promise for number, promise in enumerate(promises)}
    fitting = [worker for worker in workers if free_tokens(worker, promised) >= tokens]

    chosen = choose(workers, tokens, promised, random.Random(seed), PlacementSettings(placement_tie_tokens=100))

    assert (chosen is None) == (not workers)
    if chosen is not None and not fitting:
        assert free_tokens(chosen, promised) == max(free_tokens(worker, promised) for worker in workers)
    elif chosen is not None:
        assert chosen in fitting
        assert load_tokens(chosen, promised) <= min(load_tokens(worker, promised) for worker in fitting) + 100
