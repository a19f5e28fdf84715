"""Clients leave at random moments while small KV pools give their blocks to the next request at once.

The simulated engine's bytes are the witness: a block that is read or written after it was freed changes somebody's
answer, and is logged. Each round has one client that leaves and two that stay.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.faults.crew import Crew, hired, judged
from tests.pipeline.harness import Pipeline
from tests.pipeline.ledger import Ledger, Line, text_of
from tests.pipeline.test_worker_metrics import scrape

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="package")]

NUM_LANES = 4
"""Rounds at a time: together they want about twice the blocks there are."""
BOTH = ("--max-num-batched-tokens", "64", "--max-num-seqs", "32", "--no-prefix-caching")
"""Blocks that are freed are free for all."""
HALF_WAY_S = 0.05
"""Each call of the KV transport moves half of its bytes, the rest up to so much later: whoever has the blocks then."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def crew(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    async with hired(
        pipeline,
        tmp_path_factory.mktemp("crew"),
        prefill_flags=(*BOTH, "--num-blocks", "60", "--sim-prefill-ms", "4"),
        decode_flags=(*BOTH, "--num-blocks", "80", "--sim-decode-ms", "2"),
    ) as hired_crew:
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def judge(crew: Crew) -> AsyncIterator[None]:
    async with judged(crew):
        yield


@asynccontextmanager
async def moving_in_halves(crew: Crew) -> AsyncIterator[None]:
    rng, loop = random.Random(0), asyncio.get_running_loop()
    movers = {crew.prefill: "half written", crew.decode: "half read"}

    async def let_go() -> None:
        while True:
            for worker in movers:
                stops, worker.stops = worker.stops, []
                for stop in stops:
                    loop.call_later(rng.random() * HALF_WAY_S, stop.go)
            await asyncio.sleep(0.005)

    for worker, point in movers.items():
        worker.hold(point)
    letting_go = asyncio.create_task(let_go())
    try:
        yield
    finally:
        letting_go.cancel()
        for worker in movers:
            worker.let()


async def test_no_answer_has_a_byte_of_a_request_that_was_aborted(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    num_rounds = 200 if pipeline.deployment.settings.model.mode == "push" else 100
    seeds = iter(range(num_rounds))
    whole_s: list[float] = [0.3]
    """How long those took that were first in the queue and stayed."""

    async def ask(rng: random.Random, **more: float) -> Line:
        prompt = text_of(rng.choice((20, 100, 300, 500)), rng)
        return await ledger.ask(prompt, max_tokens=rng.choice((1, 8, 40)), stream=rng.random() < 0.5, **more)

    async def ask_first(rng: random.Random, *, leaves: bool) -> None:
        """Taken before all others, so that its client leaves in mid work and not in the queue."""
        moment_s = rng.random() * 1.1 * statistics.median(whole_s[-9:])
        line = await ask(rng, priority=-50, **({"leave_after_s": moment_s} if leaves else {}))
        if not line.is_left:
            whole_s.append(line.seconds)

    async def lane() -> None:
        for seed in seeds:
            rng = random.Random(seed)
            await asyncio.gather(ask(rng), ask_first(rng, leaves=seed % 5 > 0), ask(rng))

    async with moving_in_halves(crew):
        await asyncio.gather(*(lane() for _ in range(NUM_LANES)))

    left = [line for line in ledger.lines if line.is_left]
    prefill, decode = await scrape(crew.prefill_port), await scrape(crew.decode_port)
    in_prefill = prefill.get("pdq_prefill_jobs_total{outcome=lost}", 0)
    in_decode = decode.get("pdq_decode_requests_total{outcome=cancelled}", 0)
    print(f"{num_rounds} rounds: {len(left)} clients left, {in_prefill:g} in the prefill, {in_decode:g} at the decode")
    ledger.all_right()
    assert len(left) > num_rounds / 3
    assert in_prefill + in_decode > num_rounds / 10
