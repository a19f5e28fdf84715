"""Dead letters as operators see them."""

from __future__ import annotations

import pytest

from broker.redis_dead import DeadLetters, PayloadCounts
from tests.broker.stores import MODEL, RedisStore, job, take_one


@pytest.fixture
def letters(redis_store: RedisStore) -> DeadLetters:
    return DeadLetters(redis_store.calls, MODEL)


async def bury(store: RedisStore, name: str, *, tokens: int = 12) -> None:
    queue = store.other(max_failures=1)
    await queue.enqueue(job(name, tokens=tokens, generated_ids=b"\x01\0\0\0"))
    await queue.give_back(await take_one(queue, "p9"), failure="boom")


async def test_the_newest_comes_first_with_all_its_fields(redis_store: RedisStore, letters: DeadLetters) -> None:
    for name in ("r1", "r2", "r3"):
        await bury(redis_store, name)

    found = await letters.newest(2)

    assert [letter.request_id for letter in found] == ["r3", "r2"]
    assert found[0].fields["reason"] == "max_attempts"
    assert found[0].fields["worker"] == "p9"
    assert found[0].fields["error"] == "boom"
    assert 0 <= found[0].age_s < 60


async def test_a_letter_lists_the_causes_of_all_its_failures(redis_store: RedisStore, letters: DeadLetters) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    await queue.give_back(await take_one(queue), failure="engine_error: out of memory")
    await queue.give_back(await take_one(queue), failure=None)
    await take_one(queue)
    await redis_store.expire_leases()
    await queue.give_back(await take_one(queue), failure="something without a word of its own")

    (letter,) = await letters.newest(1)

    assert letter.fields["causes"] == "engine_error lease_expired failed"
    assert letter.fields["attempts"] == "4"


async def test_of_its_payload_only_numbers_are_told(redis_store: RedisStore, letters: DeadLetters) -> None:
    await bury(redis_store, "r1", tokens=12)
    (letter,) = await letters.newest(10)

    counts = await letters.payload(letter)
    await redis_store.calls.call("UNLINK", redis_store.queue.keys.job("r1", 1))

    assert counts == PayloadCounts(num_prompt_tokens=12, num_generated_tokens=1, max_tokens=3, mode="pull")
    assert await letters.payload(letter) == "no longer kept"


async def test_dropping_takes_letter_and_payload_once(redis_store: RedisStore, letters: DeadLetters) -> None:
    for name in ("r1", "r2"):
        await bury(redis_store, name)
    second, first = await letters.newest(10)

    answers = [await letters.drop(first), await letters.drop(first)]

    assert answers == [True, False]
    assert [letter.request_id for letter in await letters.newest(10)] == ["r2"]
    assert await redis_store.calls.call("EXISTS", redis_store.queue.keys.job("r1", 1)) == 0
    assert await letters.drop(second)
    assert await redis_store.calls.call("EXISTS", redis_store.queue.keys.dead) == 0


async def test_dropping_a_letter_leaves_the_same_request_that_is_queued_again(
    redis_store: RedisStore, letters: DeadLetters
) -> None:
    await bury(redis_store, "r1")
    (letter,) = await letters.newest(1)
    await redis_store.calls.call("UNLINK", redis_store.queue.keys.req("r1", 1))  # as its TTL does
    await redis_store.queue.enqueue(job("r1"))

    await letters.drop(letter)

    assert (await take_one(redis_store.queue)).job.request_id == "r1"
