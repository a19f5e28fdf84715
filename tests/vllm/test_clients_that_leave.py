"""A client that goes away, in each state of its request: both KV pools are whole again."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.pipeline.harness import eventually
from tests.vllm.pair import EVENT_S, Mode, Pair, tokens
from tests.vllm.prompts import LONG, SPARE

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]

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
    """D has no room, so no connector but P's own knows of it: its engine is told to release it, or holds it for hours.

    The prompt in front keeps half of D's blocks, since its KV doesn't come; this one needs more than the other half.
    """
    began_at = time.monotonic()
    long = pair.reference.prompts[LONG]
    pair.records.hold()
    in_front = ask(pair, "pull", changed(long))
    await pair.state("decoding")
    parked = ask(pair, "pull", changed([*long, *long[:100]]))
    await is_parked(pair)
    first, second = pair.records.events("prefilled", after=began_at)

    left_at = time.monotonic()
    await hang_up(parked)

    freed = await pair.event("freed", after=left_at, request=second["request"])
    print(f"\nfreed {freed['at'] - left_at:.2f} s after the client had left")
    assert not pair.records.events("freed", after=began_at, request=first["request"]), "D has no more room than before"
    await hang_up(in_front)


async def is_parked(pair: Pair) -> None:
    """Waits until a finished prefill has been refused by the decode worker."""

    async def others() -> str:
        parked = [worker["parked"] for worker in (await pair.push.workers()).values() if worker["role"] == "prefill"]
        return "" if parked == ["1"] else f"parked: {parked}"

    await eventually(others, limit_s=EVENT_S, what="a parked prefill")
