"""A request ends early, in each of its phases: its client leaves (F11), or its deadline passes (F33).

The queue entry, the compute and the KV blocks of both sides come free within a second, and a request that was still
queued is never computed. Two requests at a time: one streams, one asks for a document.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.faults.crew import SLOW_DECODE, SLOW_KV, SLOW_PREFILL, Crew, hired, judged
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger, Line

pytestmark = pytest.mark.asyncio(loop_scope="package")

FREED_WITHIN_S = 10.0
"""1 s is what is promised, and printed; the rest is for a busy machine. Without the abort it takes 30 s and more."""
REACH_S = 40.0


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def crew(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    async with hired(
        pipeline,
        tmp_path_factory.mktemp("crew"),
        prefill_flags=(*SLOW_PREFILL, *SLOW_KV),
        decode_flags=(*SLOW_DECODE, *SLOW_KV),
    ) as hired_crew:
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def judge(crew: Crew) -> AsyncIterator[None]:
    async with judged(crew):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`problem(crew, lines)`: why the requests are not there yet."""

    num_tokens: int
    """Of prompt and answer, each."""
    hold: str = ""
    """Where the prefill worker is held."""
    problem: Callable[[Crew, list[Line]], Awaitable[str]]
    num_computed: int | None = None
    """Prompts that are computed although their requests end; None: some."""
    deadline_s: float
    """Reached by then, and not over yet."""
    reason: str
    """In the deadline's message."""


async def not_queued(crew: Crew, lines: list[Line]) -> str:
    states = await crew.states()
    return "" if states == ["queued"] * 2 else f"{states}"


async def not_claimed(crew: Crew, lines: list[Line]) -> str:
    stops = [stop.point for stop in crew.prefill.stops]
    return "" if stops == ["claimed"] and (await crew.held()).leased else f"{stops}"


async def not_computing(crew: Crew, lines: list[Line]) -> str:
    held = await crew.held()
    return "" if held.prefills and "decoding" not in await crew.states() else f"{held}"


async def not_transferring(crew: Crew, lines: list[Line]) -> str:
    running, waiting = await crew.decoding()
    states = await crew.states()
    is_there = waiting >= 1 and running == 0 and "decoding" in states
    return "" if is_there else f"{running} decode, {waiting} wait, {states}"


async def not_handed_over(crew: Crew, lines: list[Line]) -> str:
    stops = [stop.point for stop in crew.prefill.stops]
    return "" if "before settle" in stops and sum(await crew.decoding()) else f"{stops}"


async def not_decoding(crew: Crew, lines: list[Line]) -> str:
    running, _ = await crew.decoding()
    texts = [line.text for line in lines if line.is_stream]
    return "" if running == 2 and all(texts) else f"{running} decode, the streams say {texts}"


PHASES = {
    "queued": Phase(
        num_tokens=20,
        hold="before take",
        problem=not_queued,
        num_computed=0,
        deadline_s=6.0,
        reason="in the queue or at a prefill worker",
    ),
    "claimed": Phase(
        num_tokens=20,
        hold="claimed",
        problem=not_claimed,
        num_computed=0,
        deadline_s=6.0,
        reason="in the queue or at a prefill worker",
    ),
    "computing": Phase(
        num_tokens=16000, problem=not_computing, num_computed=0, deadline_s=6.0, reason="in the queue or at a prefill"
    ),
    "transferring": Phase(num_tokens=1500, problem=not_transferring, deadline_s=8.0, reason="before its KV"),
    "handed over": Phase(
        num_tokens=1500, hold="before settle", problem=not_handed_over, deadline_s=8.0, reason="before its KV"
    ),
    "decoding": Phase(num_tokens=250, problem=not_decoding, deadline_s=10.0, reason="while decoding"),
}
IN_PULL = pytest.mark.parametrize("pipeline", ["pull"], indirect=True, scope="package")
"""What is the same in both modes; all else is run in each."""


def ask_two(ledger: Ledger, phase: Phase, **more: object) -> list[asyncio.Task[Line]]:
    prompts = [str(number) + "abcdefghij" * (phase.num_tokens // 10) for number in range(2)]
    return [
        asyncio.create_task(ledger.ask(prompt, max_tokens=phase.num_tokens, stream=is_stream, **more))
        for prompt, is_stream in zip(prompts, (False, True), strict=True)
    ]


async def hold(crew: Crew, phase: Phase) -> None:
    if phase.hold == "before take":
        await crew.stage.no_more_takes(crew.prefill)
    elif phase.hold:
        crew.prefill.hold(phase.hold)


async def reached(crew: Crew, phase: Phase, ledger: Ledger) -> None:
    async def elsewhere() -> str:
        return await phase.problem(crew, ledger.lines)

    await eventually(elsewhere, limit_s=REACH_S, what="phase")


@pytest.mark.parametrize("name", ["computing", "transferring", "handed over", "decoding"])
async def test_a_client_that_leaves_frees_all_that_its_request_holds(crew: Crew, ledger: Ledger, name: str) -> None:
    await leave(crew, ledger, name)


@IN_PULL
@pytest.mark.parametrize("name", ["queued", "claimed"])
async def test_a_request_whose_client_leaves_before_its_prefill_is_never_computed(
    crew: Crew, ledger: Ledger, name: str
) -> None:
    await leave(crew, ledger, name)


@pytest.mark.parametrize("name", ["transferring", "handed over"])
async def test_a_deadline_that_passes_while_the_kv_is_on_its_way(crew: Crew, ledger: Ledger, name: str) -> None:
    await expire(crew, ledger, name)


@IN_PULL
@pytest.mark.parametrize("name", ["queued", "claimed", "computing", "decoding"])
async def test_a_deadline_is_told_when_it_passes_and_frees_all_that_its_request_holds(
    crew: Crew, ledger: Ledger, name: str
) -> None:
    await expire(crew, ledger, name)


async def leave(crew: Crew, ledger: Ledger, name: str) -> None:
    phase, num_computed = PHASES[name], await crew.prefilled()
    await hold(crew, phase)
    asking = ask_two(ledger, phase)
    await reached(crew, phase, ledger)

    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    seconds = await crew.freed(limit_s=FREED_WITHIN_S)

    crew.prefill.let()
    print(f"{name}: free after {seconds:.2f} s")
    await is_served_as_before(crew, num_computed, phase)


async def expire(crew: Crew, ledger: Ledger, name: str) -> None:
    phase, num_computed = PHASES[name], await crew.prefilled()
    await hold(crew, phase)
    asking = ask_two(ledger, phase, request_timeout_s=phase.deadline_s)
    await reached(crew, phase, ledger)

    lines = await asyncio.gather(*asking)
    seconds = await crew.freed(limit_s=FREED_WITHIN_S)

    crew.prefill.let()
    print(f"{name}: told after {[round(line.seconds, 2) for line in lines]} s, free after {seconds:.2f} s")
    ledger.all_truthful("deadline_exceeded")
    assert not ledger.num_right
    for line in lines:
        has_begun = line.is_stream and name == "decoding"
        assert line.status == (200 if has_begun else 504)
        assert bool(line.text) == has_begun
        assert line.seconds >= phase.deadline_s - 0.1
    assert any(phase.reason in (line.error or {})["message"] for line in lines)
    await is_served_as_before(crew, num_computed, phase)


async def is_served_as_before(crew: Crew, num_computed: float, phase: Phase) -> None:
    """One more is right, and of the two that ended only what must be was computed."""
    ledger = Ledger(crew.pipeline.client)
    await ledger.ask("still alive", max_tokens=5)
    ledger.all_right()
    if phase.num_computed is not None:
        assert await crew.prefilled() == num_computed + phase.num_computed + 1
