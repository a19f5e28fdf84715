"""What somebody else put into the queue, or what is left when its group was deleted: never in anybody's way."""

from __future__ import annotations

import pytest

from broker.messages import Go
from broker.redis_dead import DeadLetters
from broker.redis_queue import JOBS
from pdq.wire.codec import Codec
from pdq.wire.types import Pair
from tests.broker.stores import MODEL, RedisStore, job, take_one

ANY = 10**9
FIVE_MB = b"x" * 5_000_000


async def put_in(store: RedisStore, fields: dict[str, object], *, is_ready: bool) -> bytes:
    """An entry by hand. Returns its id."""
    keys = store.queue.keys
    flat = [part for pair in fields.items() for part in pair]
    entry: bytes = await store.calls.call("XADD", keys.stream, "*", *flat)  # type: ignore[arg-type]
    if is_ready:
        await store.calls.call("ZADD", keys.ready, 0, entry)
    return entry


def entry_of(request_id: str, **changes: object) -> dict[str, object]:
    """Fields as an enqueue writes them."""
    fields: dict[str, object] = {"id": request_id, "gen": 1, "tokens": 4, "priority": 0, "mode": "pull", "tenant": ""}
    fields |= {"gateway": "tcp://127.0.0.1:1", "gateway_id": "gateway-a", "v": 1, "traceparent": ""}
    return fields | {"due": "1.0", "deadline": 10**15} | changes


MALFORMED = {
    "nothing of ours": {"hello": "world"},
    "no id": {key: value for key, value in entry_of("r").items() if key != "id"},
    "no gateway": {key: value for key, value in entry_of("r").items() if key != "gateway"},
    "tokens that are no number": entry_of("r", tokens="many"),
    "a gen that is no number": entry_of("r", gen="1.5"),
    "a due that is not finite": entry_of("r", due="nan"),
    "a deadline that is no number": entry_of("r", deadline="soon"),
    "another version": entry_of("r", v=7),
    "5 MB of one field": {"id": FIVE_MB},
    "5 MB of an unknown field": {"payload": FIVE_MB},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
async def test_entries_that_are_no_jobs_become_dead_letters_and_hide_none(
    redis_store: RedisStore, fields: dict[str, object]
) -> None:
    """One that was queued by hand, one in the stream only, and one that somebody read by hand."""
    queue, keys = redis_store.queue, redis_store.queue.keys
    await queue.enqueue(job("fine"))
    await put_in(redis_store, fields, is_ready=True)
    await put_in(redis_store, fields, is_ready=False)
    leased = await put_in(redis_store, fields, is_ready=False)
    await redis_store.calls.call("XCLAIM", keys.stream, "prefill", "p9", 0, leased, "FORCE", "JUSTID")

    dead = list(await redis_store.expire_leases())
    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)
    dead += taken.dead

    assert [lease.job.request_id for lease in taken.leases] == ["fine"]
    assert [found.reason for found in dead] == ["payload_invalid"] * 3
    assert dead[0].detail.startswith("stream entry ")
    await queue.settle(taken.leases[0], state="decoding")
    assert await redis_store.leftovers() == (0, 0, 0)
    letters = await DeadLetters(redis_store.calls, MODEL).newest(10)
    assert [letter.fields["reason"] for letter in letters] == ["payload_invalid"] * 3
    assert {letter.fields["error"] for letter in letters} == {found.detail for found in dead}
    assert max(len(letter.fields["id"]) for letter in letters) <= 200


PAYLOADS = {
    "no msgpack": b"\xc1 not a job",
    "empty": b"",
    "another message": Codec(Go).encode(Go(request_id="r", pair=Pair(gen=1, attempt=1))),
    "another version": JOBS.encode(job("r")).replace(b"\x01", b"\x63", 1),
    "another request": JOBS.encode(job("somebody else's")),
    "another gen": JOBS.encode(job("r", gen=2)),
    "5 MB of anything": FIVE_MB,
}


@pytest.mark.parametrize("max_jobs", [1, 4])
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_a_payload_that_is_no_job_becomes_a_dead_letter_and_hides_none(
    redis_store: RedisStore, payload: bytes, max_jobs: int
) -> None:
    """Not even for a worker that takes one job at a time: it would sleep before a queue that is not empty."""
    queue = redis_store.queue
    await queue.enqueue(job("r"))
    await queue.enqueue(job("fine", tokens=50))
    await redis_store.calls.call("SET", queue.keys.job("r", 1), payload)

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=max_jobs)

    assert [lease.job.request_id for lease in taken.leases] == ["fine"]
    assert [(dead.request_id, dead.reason, dead.gateway_id) for dead in taken.dead] == [
        ("r", "payload_invalid", "gateway-a")
    ]
    assert taken.dead[0].detail
    assert await redis_store.state("r") == "payload_invalid"
    assert (await queue.depth()).dead == 1


async def test_jobs_of_a_group_that_was_deleted_are_queued_again(redis_store: RedisStore) -> None:
    queue, keys = redis_store.queue, redis_store.queue.keys
    for name in ("leased", "queued"):
        await queue.enqueue(job(name))
    lease = await take_one(queue)
    await redis_store.calls.call("XGROUP", "DESTROY", keys.stream, "prefill")

    await queue.reap()
    taken = await queue.take("p2", max_tokens=ANY, max_jobs=4)

    assert [(again.job.request_id, again.pair.attempt, again.failures) for again in taken.leases] == [
        ("leased", 2, 0),
        ("queued", 1, 0),
    ]
    assert await queue.renew((lease,)) == (False,)
    assert not await queue.settle(lease, state="decoding")
    assert all(await queue.renew(taken.leases))


async def test_what_is_nobody_s_is_found_behind_many_that_are_somebody_s(redis_store: RedisStore) -> None:
    queue = redis_store.other(reap_batch=10)
    for number in range(35):
        await queue.enqueue(job(f"r{number}"))
    await put_in(redis_store, {"hello": "world"}, is_ready=False)
    assert (await redis_store.leftovers())[::2] == (36, 35)

    await queue.reap()

    assert (await redis_store.leftovers())[::2] == (36, 36)


async def test_reaping_puts_nothing_into_the_queue_that_is_leased_or_queued(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    for name in ("leased", "queued"):
        await queue.enqueue(job(name))
    lease = await take_one(queue)
    await put_in(redis_store, {"hello": "world"}, is_ready=False)

    await queue.reap()

    assert await redis_store.leftovers() == (3, 1, 2)
    assert await queue.renew((lease,)) == (True,)
