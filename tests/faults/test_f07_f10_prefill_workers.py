"""F7: prefill workers come and go all the time. F10: one of them is ten times slower than its peer."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults.stage import Stage
from tests.pipeline import process_logs
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger, text_of
from tests.pipeline.test_scaling import constant_load

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.parametrize("pipeline", ["push"], indirect=True, scope="package"),
]
"""Pull: `pipeline/test_scaling.py`."""

NUM_REQUESTS = 30
FAST_MS, SLOW_MS = 150, 1500
ONE_AT_A_TIME = ("--max-num-seqs", "1", "--take-ahead-s", "0", "--no-prefix-caching")


@pytest.mark.parametrize("num_turns", [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_prefill_workers_that_come_and_go_all_the_time_cost_nobody_an_answer(
    stage: Stage, ledger: Ledger, num_turns: int
) -> None:
    """There is always one; each has just come when the one before it is told to stop, or killed."""
    stage.allowed_faults = ("engine_stalled",)  # so it may look while others start
    await stage.spawn("decode")
    old = await stage.start("prefill")
    await stage.serving(*stage.workers)
    await stage.ready()
    async with constant_load(ledger):
        for turn in range(num_turns):
            new = await stage.start("prefill")
            if turn % 2:
                old.kill()
            else:
                old.process.terminate()
            assert (await old.ended() == 0) == (turn % 2 == 0)
            old = new

    assert len(ledger.lines) > num_turns
    ledger.all_right()


async def test_a_prefill_worker_ten_times_slower_takes_little_and_holds_up_nobody(stage: Stage, ledger: Ledger) -> None:
    """Round robin would give each of them half, and all would wait for the slow one's last."""
    await stage.spawn("decode")
    await stage.spawn("prefill", *ONE_AT_A_TIME, "--sim-prefill-ms", str(FAST_MS))
    slow = await stage.spawn("prefill", *ONE_AT_A_TIME, "--sim-prefill-ms", str(SLOW_MS))
    await stage.serving(*stage.workers)
    await stage.ready()
    rng = random.Random(10)

    await asyncio.gather(*(ledger.ask(text_of(300, rng), stream=number % 2 == 0) for number in range(NUM_REQUESTS)))

    async def untold() -> str:
        told = len(process_logs.events(stage.log_dir, "handed_over"))
        return "" if told >= NUM_REQUESTS else f"{told} handed over"

    await eventually(untold, limit_s=40, what="word of every hand-over")  # which a client's answer does not wait for
    by_slow = len(process_logs.events(stage.log_dir, "handed_over", slow.name))
    print(f"{by_slow} of {NUM_REQUESTS} by the slow one, the last after {max(x.seconds for x in ledger.lines):.1f} s")
    ledger.all_right()
    assert 0 < by_slow < NUM_REQUESTS / 3
