"""F42: the decode worker has no room: no prompt is computed that can't be placed, but for the few that may be parked,
and nothing locks up. F33: a deadline passes while a prefill is parked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.faults.crew import Crew, hired, judged
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger, Line
from tests.pipeline.test_worker_metrics import scrape

pytestmark = pytest.mark.asyncio(loop_scope="package")

PARK_LIMIT = 2
MOST_HELD = PARK_LIMIT + 1
"""One more may have been taken while it was not clear yet that there is no room."""
ALL_ANEW = ("--no-prefix-caching",)
SLOW = ("--take-ahead-s", "0", "--sim-prefill-ms", "500")
"""Whether there is room for one is answered before the next one is computed, and taken."""
PROMPT = "0123456789" * 40
NUM_LONG, NUM_SHORT = 340, 5
"""Tokens of the one that fills the pool for 50 s, or until its client leaves; and of those beside it."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def crew(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    async with hired(
        pipeline,
        tmp_path_factory.mktemp("crew"),
        prefill_flags=(*ALL_ANEW, "--park-limit", str(PARK_LIMIT), "--park-s", "60", *SLOW),
        decode_flags=(*ALL_ANEW, "--num-blocks", "48", "--sim-decode-ms", "150"),
    ) as hired_crew:
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def judge(crew: Crew) -> AsyncIterator[None]:
    async with judged(crew):
        yield


async def full(crew: Crew, ledger: Ledger) -> tuple[asyncio.Task[Line], Line]:
    """The request that has nearly all of the decode worker's blocks, and decodes."""
    asking = asyncio.create_task(ledger.ask(f"fills it {PROMPT}", max_tokens=NUM_LONG, stream=True))
    await crew.stage.streaming(ledger)
    return asking, ledger.lines[0]


async def parked(crew: Crew, count: int) -> None:
    async def too_few() -> str:
        num_parked = (await scrape(crew.prefill_port))["pdq_prefill_parked"]
        return "" if num_parked >= count else f"{num_parked:g} parked"

    await eventually(too_few, limit_s=60, what=f"{count} parked")


async def test_a_full_decode_worker_gets_no_more_prompts_computed_than_may_be_parked(
    crew: Crew, ledger: Ledger
) -> None:
    num_computed = await crew.prefilled()
    filling, line = await full(crew, ledger)
    others = [
        asyncio.create_task(ledger.ask(f"{number} {PROMPT}", max_tokens=NUM_SHORT, stream=number % 2 == 0))
        for number in range(8)
    ]
    await parked(crew, PARK_LIMIT if crew.stage.mode == "pull" else 1)

    async def not_all_there() -> str:
        entries = (await crew.held()).entries
        return "" if entries == len(others) else f"{entries} entries"

    await eventually(not_all_there, limit_s=60, what="eight that wait")
    num_seen = len(line.text)

    async def too_early() -> str:
        return "" if filling.done() or len(line.text) > num_seen + 15 else f"{len(line.text)} tokens"

    await eventually(too_early, limit_s=60, what="time that passes")
    held, computed = await crew.held(), await crew.prefilled() - num_computed
    assert not filling.done(), "it ended too early"
    assert computed <= 1 + (MOST_HELD if crew.stage.mode == "pull" else 0)
    assert held.leased <= MOST_HELD
    assert held.queued >= 8 - MOST_HELD
    filling.cancel()
    await asyncio.gather(*others)

    assert ledger.num_right == 8


async def test_a_deadline_that_passes_while_the_request_is_parked_is_told_and_frees_its_blocks(
    crew: Crew, ledger: Ledger
) -> None:
    filling, _ = await full(crew, ledger)
    own = Ledger(ledger.client)
    asking = asyncio.create_task(own.ask(f"has no time {PROMPT}", request_timeout_s=15.0))
    await parked(crew, 1)

    line = await asking
    assert not filling.done(), "there was room"
    assert (line.status, line.error and line.error["code"]) == (504, "deadline_exceeded")
    told = (line.error or {})["message"]
    assert "in the queue or at a prefill worker" in told or "no decode worker had room" in told  # whoever was first

    async def held_still() -> str:
        held = await crew.held()
        return str(held) if held.leased or held.entries or held.prefills or held.prefill_blocks else ""

    await eventually(held_still, limit_s=40, what="free prefill worker")
    assert line.text == ""
    filling.cancel()
