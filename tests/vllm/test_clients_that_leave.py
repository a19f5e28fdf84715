"""A client that goes away, in each state of its request: both KV pools are whole again."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.vllm.pair import Mode, Pair, tokens
from tests.vllm.prompts import LONG

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]

FREED_WITHIN_S = 20.0
"""Two on a machine that has nothing else to do; told by nobody, P would hold the pin for a minute (kv_hold_s)."""
MANY_TOKENS = 400


def ask(pair: Pair, mode: Mode, prompt: list[int], max_tokens: int = MANY_TOKENS) -> asyncio.Task[list[int]]:
    return asyncio.create_task(tokens(pair.pipelines[mode], prompt, max_tokens, ignore_eos=True))


async def hang_up(asking: asyncio.Task[list[int]]) -> None:
    """Closes the client's connection."""
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled(), asking.result()


def changed(prompt: list[int], number: int) -> list[int]:
    """Another prompt of the same length, which no prefix cache knows."""
    return [1000 + number, *prompt[1:]]


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_it_is_queued(pair: Pair, mode: Mode) -> None:
    long = pair.reference.prompts[LONG]
    in_front = [ask(pair, mode, changed(long, number), 1) for number in range(2)]
    queued = ask(pair, mode, changed(long, 2))
    await pair.states(["prefill", "queued", "queued"])

    await hang_up(queued)

    await asyncio.gather(*in_front)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_its_prompt_is_computed(pair: Pair, mode: Mode) -> None:
    asking = ask(pair, mode, changed(pair.reference.prompts[LONG], 10))
    await pair.state("prefill")

    await hang_up(asking)

    await pair.state("cancelled")


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_it_waits_for_its_kv(pair: Pair, mode: Mode) -> None:
    began_at = time.monotonic()
    pair.records.hold()
    asking = ask(pair, mode, changed(pair.reference.prompts[LONG], 20))
    await pair.event("call", after=began_at)
    await pair.event("prefilled", after=began_at)
    assert not pair.records.events("blocks", after=began_at, side="D"), "its KV isn't complete"

    await hang_up(asking)


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_while_its_answer_is_decoded(pair: Pair, mode: Mode) -> None:
    asking = ask(pair, mode, pair.reference.prompts[LONG])
    await pair.state("decoding")

    await hang_up(asking)


async def test_after_the_prefill_the_pin_is_freed_at_once(pair: Pair) -> None:
    """No decode worker has taken it: D's pool is full with another prompt of this length."""
    began_at = time.monotonic()
    long = pair.reference.prompts[LONG]
    decoding = ask(pair, "pull", changed(long, 30))
    await pair.state("decoding")
    parked = ask(pair, "pull", changed(long, 31))
    first = await pair.event("prefilled", after=began_at)
    second = await pair.event("prefilled", after=first["at"])

    await hang_up(parked)
    left_at = time.monotonic()

    freed = await pair.event("freed", after=began_at, request=second["request"])
    print(f"\nfreed {freed['at'] - left_at:.2f} s after the client had left")
    assert freed["at"] - left_at < FREED_WITHIN_S
    await hang_up(decoding)
