"""A client that goes away, in each state of its request: both KV pools are whole again."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.vllm.pair import Mode, Pair, tokens
from tests.vllm.prompts import LONG, SPARE

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]

FREED_WITHIN_S = 20.0
"""Two on a machine that has nothing else to do; told by nobody, P would hold the pin for a minute (kv_hold_s)."""
MANY_TOKENS = 400
_first_ids = itertools.count(1000)


def ask(pair: Pair, mode: Mode, prompt: list[int], max_tokens: int = MANY_TOKENS) -> asyncio.Task[list[int]]:
    return asyncio.create_task(tokens(pair.pipelines[mode], prompt, max_tokens, ignore_eos=True))


async def hang_up(asking: asyncio.Task[list[int]]) -> None:
    """Closes the client's connection."""
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled(), asking.result()


async def aborted(pair: Pair, *, after: float) -> None:
    """In an engine; one that went on by itself would end, too."""
    await pair.event("ended", after=after, status="FINISHED_ABORTED")


def changed(prompt: list[int]) -> list[int]:
    """Another prompt of the same length, which no prefix cache knows."""
    return [next(_first_ids), *prompt[1:]]


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_it_is_queued(pair: Pair, mode: Mode) -> None:
    prompt = pair.reference.prompts[SPARE[0]]
    in_front = [ask(pair, mode, changed(prompt), 1) for _ in range(2)]
    queued = ask(pair, mode, changed(prompt))
    await pair.states(["prefill", "queued", "queued"])

    await hang_up(queued)

    await asyncio.gather(*in_front)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_its_prompt_is_computed(pair: Pair, mode: Mode) -> None:
    asking = ask(pair, mode, changed(pair.reference.prompts[SPARE[0]]))
    await pair.state("prefill")

    await hang_up(asking)

    await pair.state("cancelled")


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_it_waits_for_its_kv(pair: Pair, mode: Mode) -> None:
    began_at = time.monotonic()
    pair.records.hold()
    asking = ask(pair, mode, changed(pair.reference.prompts[SPARE[0]]))
    await pair.event("call", after=began_at)
    await pair.event("prefilled", after=began_at)
    assert not pair.records.events("blocks", after=began_at, side="D"), "its KV isn't complete"

    await hang_up(asking)

    await aborted(pair, after=began_at)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_its_answer_is_decoded(pair: Pair, mode: Mode) -> None:
    began_at = time.monotonic()
    asking = ask(pair, mode, changed(pair.reference.prompts[SPARE[0]]))
    await pair.event("blocks", after=began_at, side="D")

    await hang_up(asking)

    await aborted(pair, after=began_at)


async def test_after_the_prefill_the_pin_is_freed_at_once(pair: Pair) -> None:
    """No decode worker has taken it: D's pool is full with another prompt of this length."""
    began_at = time.monotonic()
    long = pair.reference.prompts[LONG]
    decoding = ask(pair, "pull", changed(long))
    await pair.state("decoding")
    parked = ask(pair, "pull", changed(long))
    first = await pair.event("prefilled", after=began_at)
    second = await pair.event("prefilled", after=first["at"])

    await hang_up(parked)
    left_at = time.monotonic()

    freed = await pair.event("freed", after=began_at, request=second["request"])
    print(f"\nfreed {freed['at'] - left_at:.2f} s after the client had left")
    assert freed["at"] - left_at < FREED_WITHIN_S
    await hang_up(decoding)
