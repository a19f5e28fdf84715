"""Clients leave while small KV pools give their blocks to the next request at once.

The simulated engine's bytes are the witness: a block that is read or written after it was freed changes somebody's
answer, and is logged.
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
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger, Line, text_of
from tests.pipeline.test_worker_metrics import scrape

pytestmark = pytest.mark.asyncio(loop_scope="package")

CAUGHT_LIMIT_S = 60.0
NUM_GROWN = 450
"""Tokens of the one that stays: it still decodes when the other one's client has left."""
NUM_REUSED = 80
"""Tokens that it grows by: into more than half of the blocks that the other one had."""
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
        decode_flags=(*BOTH, "--num-blocks", "80", "--sim-decode-ms", "6"),
    ) as hired_crew:
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def judge(crew: Crew) -> AsyncIterator[None]:
    async with judged(crew):
        yield


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_a_request_that_grows_beside_an_aborted_transfer_has_no_byte_of_it(
    crew: Crew, ledger: Ledger, is_short: bool
) -> None:
    """The half that was still to come arrives when others may have the blocks: they must not."""
    num_rounds = 10 if is_short else 200 if crew.stage.mode == "push" else 100
    num_caught = 0
    for seed in range(num_rounds):
        num_caught += await grown_past_an_aborted_one(crew, ledger, random.Random(seed))
    print(f"{num_caught} of {num_rounds} grew past the aborted one")
    ledger.all_right()
    assert num_caught > 1


async def grown_past_an_aborted_one(crew: Crew, ledger: Ledger, rng: random.Random) -> bool:
    """False: it was slow, the one that grows had ended before."""
    mover, point = {"push": (crew.prefill, "half written"), "pull": (crew.decode, "half read")}[crew.stage.mode]
    prompt = text_of(NUM_GROWN, rng)
    growing = asyncio.create_task(ledger.ask(prompt, max_tokens=NUM_GROWN, stream=True))
    line = await under_way(ledger, prompt)
    mover.hold(point)
    leaving = asyncio.create_task(Ledger(ledger.client).ask(text_of(rng.randint(60, 100), rng), max_tokens=8))
    await mover.reached(point)
    num_cancelled, num_seen = await cancelled(crew), len(line.text)
    leaving.cancel()
    await asyncio.wait([leaving])

    async def too_early() -> str:
        grown, aborted = len(line.text) - num_seen, await cancelled(crew) - num_cancelled
        is_enough = growing.done() or (grown > NUM_REUSED and aborted)
        return "" if is_enough else f"{grown} tokens more, {aborted:g} aborted"

    await eventually(too_early, limit_s=CAUGHT_LIMIT_S, what="growth after the abort")
    is_caught = not growing.done()
    mover.let(point)
    await asyncio.gather(growing, ledger.ask(text_of(200, rng), max_tokens=40))
    return is_caught


async def under_way(ledger: Ledger, prompt: str) -> Line:
    """That prompt's, once it decodes."""

    def lines() -> list[Line]:
        return [line for line in ledger.lines if line.prompt == prompt and line.text]

    async def silent() -> str:
        return "" if lines() else "nothing yet"

    await eventually(silent, limit_s=CAUGHT_LIMIT_S, what="stream")
    return lines()[0]


async def cancelled(crew: Crew) -> float:
    """Requests that the decode worker has aborted."""
    return (await scrape(crew.decode_port)).get("pdq_decode_requests_total{outcome=cancelled}", 0)


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


@pytest.mark.long
async def test_no_answer_has_a_byte_of_a_request_that_was_aborted_at_any_moment(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    """Each round has one client that leaves and two that stay."""
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
