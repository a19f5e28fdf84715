"""What a worker takes: never more than its pool holds, never more than it computes next."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base import JobLease, PrefillJob
from broker.prefill_time import PrefillTime
from engine.base import EngineOutput
from engine.ledger import KvLedger
from pdq.wire.types import Pair, SamplingParams, pack_ids
from prefill_worker.held import HeldJob, HeldJobs, Phase
from prefill_worker.settings import PrefillWorkerSettings
from prefill_worker.taker import take_limits

FAST = PrefillTime(fixed_ms=0, token_ms=0.001, square_ms=0)


async def held_job(request_id: str, num_tokens: int, phase: Phase = Phase.COMPUTING) -> HeldJob:
    job = PrefillJob(
        request_id=request_id,
        gen=1,
        prompt_ids=pack_ids(range(num_tokens)),
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=1),
        deadline_s=60,
        gateway="tcp://127.0.0.1:1",
        gateway_id="gateway-1",
        mode="pull",
    )
    lease = JobLease(
        job=job,
        entry_id="1-0",
        owner="p",
        pair=Pair(gen=1, attempt=1),
        remaining_s=60,
        queue_wait_s=0,
        failures=0,
    )
    return HeldJob(lease=lease, taken_at=0, phase=phase)


async def test_an_empty_worker_takes_one_job_of_any_size() -> None:
    tokens, jobs = take_limits(HeldJobs(), KvLedger(total_blocks=4, block_size=16), PrefillWorkerSettings())

    assert jobs == 1
    assert tokens > 10**6


async def test_a_busy_worker_fills_up_to_take_tokens_and_to_its_pool() -> None:
    held_jobs = HeldJobs()
    ledger = KvLedger(total_blocks=1000, block_size=16)
    held_jobs.add(await held_job("a", 1500))
    ledger.promise("a", 1500)

    assert take_limits(held_jobs, ledger, PrefillWorkerSettings(take_tokens=2048), FAST)[0] == 548
    assert take_limits(held_jobs, ledger, PrefillWorkerSettings(take_tokens=1500), FAST) == (0, 0)


async def test_a_slow_worker_takes_only_what_it_begins_soon() -> None:
    held_jobs, ledger = HeldJobs(), KvLedger(total_blocks=1000, block_size=16)
    held_jobs.add(await held_job("a", 1500))
    ledger.promise("a", 1500)
    settings = PrefillWorkerSettings(take_ahead_s=0.1)

    def limit(token_ms: float) -> int:
        time = PrefillTime(fixed_ms=20, token_ms=token_ms, square_ms=0)
        return take_limits(held_jobs, ledger, settings, time)[0]

    assert limit(0.01) == 548
    assert limit(0.05) == 100
    assert limit(1.0) == 0
    assert take_limits(held_jobs, ledger, settings) == (0, 0)


async def test_nothing_is_taken_at_the_park_limit() -> None:
    held_jobs = HeldJobs()
    ledger = KvLedger(total_blocks=1000, block_size=16)
    held_jobs.add(await held_job("a", 10, Phase.PARKED))

    assert take_limits(held_jobs, ledger, PrefillWorkerSettings(park_limit=1)) == (0, 0)


async def test_an_idle_engine_with_pinned_blocks_takes_only_what_fits_beside_them() -> None:
    ledger = KvLedger(total_blocks=10, block_size=16)
    ledger.promise("pinned", 100)

    assert take_limits(HeldJobs(), ledger, PrefillWorkerSettings()) == (48, 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100), st.booleans()), max_size=40))
def test_the_ledger_never_promises_more_than_the_pool(events: list[tuple[int, int, bool]]) -> None:
    ledger = KvLedger(total_blocks=10, block_size=16)
    model: dict[str, int] = {}
    for number, tokens, is_release in events:
        name = str(number)
        if is_release:
            assert ledger.release(name) == (model.pop(name, None) is not None)
        elif name in model:
            with pytest.raises(ValueError, match="has a promise"):
                ledger.promise(name, tokens)
        elif ledger.can_promise(tokens):
            ledger.promise(name, tokens)
            model[name] = -(-tokens // 16)
        assert ledger.free_blocks == 10 - sum(model.values())
        assert ledger.free_blocks >= 0
        assert ledger.is_empty == (not model)


@given(st.integers(1, 40), st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_tokens_within_tokens_for_fit_however_they_are_spread(free_blocks: int, sizes: list[int]) -> None:
    ledger = KvLedger(total_blocks=free_blocks, block_size=16)
    if sum(sizes) > ledger.tokens_for(len(sizes)):
        return

    for number, size in enumerate(sizes):
        ledger.promise(str(number), size)

    assert ledger.free_blocks >= 0


async def test_nothing_joins_a_job_that_failed_before_until_it_is_computed() -> None:
    held_jobs, ledger = HeldJobs(), KvLedger(total_blocks=1000, block_size=16)
    suspect = await held_job("a", 16)
    suspect.lease = dataclasses.replace(suspect.lease, failures=1)
    held_jobs.add(suspect)
    ledger.promise("a", 16)
    assert take_limits(held_jobs, ledger, PrefillWorkerSettings(), FAST) == (0, 0)

    suspect.prefilled.set_result(EngineOutput(engine_request_id="a", finish="prefilled"))

    assert take_limits(held_jobs, ledger, PrefillWorkerSettings(), FAST) != (0, 0)
