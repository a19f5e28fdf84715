"""What the prefill queue promises, on every store."""

from __future__ import annotations

import time

from broker.base import CODE_OF_END
from tests.broker.stores import LIMIT_S, Store, job, take_one

ANY = 10**9


async def test_a_lease_carries_the_job_the_pair_and_the_time_left(store: Store) -> None:
    sent = job("r1", gen=3, tokens=7, tenant="t", traceparent="00-ab", generated_ids=b"\x01\0\0\0", deadline_s=50.0)
    began = time.monotonic()
    entry_id = await store.queue.enqueue(sent)

    lease = await take_one(store.queue, "p1")
    passed_s = time.monotonic() - began + 0.1  # the store has a clock of its own

    assert lease.job == sent
    assert (lease.entry_id, lease.owner, str(lease.pair), lease.failures) == (entry_id, "p1", "3.1", 0)
    assert 50.0 - passed_s < lease.remaining_s <= 50.0
    assert 0 <= lease.queue_wait_s < passed_s


async def test_a_repeated_enqueue_adds_nothing_and_returns_the_same_entry(store: Store) -> None:
    first = await store.queue.enqueue(job("r1"))
    second = await store.queue.enqueue(job("r1"))
    lease = await take_one(store.queue)
    third = await store.queue.enqueue(job("r1"))
    await store.queue.settle(lease, state="decode")

    assert first == second == third == await store.queue.enqueue(job("r1"))
    assert await store.leftovers() == (0, 0, 0)


async def test_another_gen_of_the_same_request_is_another_job(store: Store) -> None:
    await store.queue.enqueue(job("r1", gen=1))
    await store.queue.enqueue(job("r1", gen=2))

    assert (await store.queue.depth()).queued == 2


async def test_take_stays_within_the_token_budget_and_keeps_strict_order(store: Store) -> None:
    await store.queue.enqueue(job("a", tokens=60))
    await store.queue.enqueue(job("b", tokens=70))
    await store.queue.enqueue(job("urgent", tokens=500, priority=-1))

    none_fits = await store.queue.take("p1", max_tokens=200, max_jobs=8)
    first_fits = await store.queue.take("p1", max_tokens=560, max_jobs=8)
    one_more = await store.queue.take("p1", max_tokens=ANY, max_jobs=1)

    assert none_fits.leases == ()
    assert [lease.job.request_id for lease in first_fits.leases] == ["urgent", "a"]
    assert [lease.job.request_id for lease in one_more.leases] == ["b"]


async def test_take_says_whether_its_limits_left_jobs_behind(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.queue.enqueue(job(name, tokens=10))

    by_number = await store.queue.take("p1", max_tokens=ANY, max_jobs=1)
    by_tokens = await store.queue.take("p1", max_tokens=5, max_jobs=8)
    rest = await store.queue.take("p1", max_tokens=ANY, max_jobs=8)

    assert (len(by_number.leases), by_number.is_more_waiting) == (1, True)
    assert (len(by_tokens.leases), by_tokens.is_more_waiting) == (0, True)
    assert (len(rest.leases), rest.is_more_waiting) == (2, False)


async def test_take_of_an_empty_queue_returns_nothing(store: Store) -> None:
    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert (taken.leases, taken.dead) == ((), ())


async def test_a_job_past_its_deadline_ends_at_the_take_and_the_others_go_on(store: Store) -> None:
    await store.queue.enqueue(job("late", deadline_s=0.0))
    await store.queue.enqueue(job("fine", tokens=50))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert [(dead.request_id, dead.reason, dead.gateway) for dead in taken.dead] == [
        ("late", "deadline", "tcp://127.0.0.1:1")
    ]
    assert [lease.job.request_id for lease in taken.leases] == ["fine"]
    assert await store.state("late") == "deadline"


async def test_settle_removes_everything_and_a_second_settle_is_refused(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    lease = await take_one(store.queue)

    assert await store.queue.settle(lease, state="decode", decode_worker="d1")
    assert not await store.queue.settle(lease, state="decode")
    assert await store.state("r1") == "decode"
    assert await store.leftovers() == (0, 0, 0)


async def test_giving_back_keeps_the_place_and_counts_no_failure(store: Store) -> None:
    await store.queue.enqueue(job("first"))
    await store.queue.enqueue(job("second", tokens=50))
    lease = await take_one(store.queue)

    for _ in range(10):
        assert await store.queue.give_back(lease, failure=None) is None
        lease = await take_one(store.queue)

    assert lease.job.request_id == "first"
    assert (lease.failures, lease.pair.attempt) == (0, 11)


async def test_three_failures_make_a_dead_letter(store: Store) -> None:
    await store.queue.enqueue(job("poison"))
    for _ in range(2):
        assert await store.queue.give_back(await take_one(store.queue), failure="engine crashed") is None
    lease = await take_one(store.queue)

    dead = await store.queue.give_back(lease, failure="engine crashed")

    assert lease.failures == 2
    assert dead is not None
    assert (dead.request_id, str(dead.pair), dead.reason, dead.detail) == (
        "poison",
        "1.3",
        "max_attempts",
        "engine crashed",
    )
    assert (await store.queue.depth()).dead == 1
    assert await store.state("poison") == "max_attempts"
    assert await store.leftovers() == (0, 0, 0)


async def test_a_reaped_job_keeps_its_place_and_counts_a_failure(store: Store) -> None:
    await store.queue.enqueue(job("first"))
    await store.queue.enqueue(job("second", tokens=50))
    await take_one(store.queue, "dead-worker")

    reaped = await store.expire_leases()
    lease = await take_one(store.queue, "p2")

    assert reaped == ()
    assert (lease.job.request_id, lease.failures, lease.pair.attempt) == ("first", 1, 2)


async def test_a_job_whose_workers_keep_dying_becomes_a_dead_letter(store: Store) -> None:
    await store.queue.enqueue(job("poison"))
    reaped: tuple[object, ...] = ()
    for number in range(3):
        await take_one(store.queue, f"p{number}")
        reaped = await store.expire_leases()

    (dead,) = reaped

    assert (dead.request_id, dead.reason, dead.detail) == ("poison", "max_attempts", "lease of p2 ran out")
    assert await store.leftovers() == (0, 0, 0)


async def test_a_zombie_can_do_nothing_after_its_lease_was_reaped(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    zombie = await take_one(store.queue, "p1")
    await store.expire_leases()

    refused_while_queued = await store.queue.renew((zombie,))
    lease = await take_one(store.queue, "p2")

    assert refused_while_queued == (False,)
    assert await store.queue.renew((zombie, lease)) == (False, True)
    assert not await store.queue.settle(zombie, state="decode")
    assert await store.queue.give_back(zombie, failure="late") is None
    assert await store.queue.renew((lease,)) == (True,)
    assert await store.queue.settle(lease, state="decode")


async def test_a_zombie_of_the_same_worker_is_fenced_by_its_attempt(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    old = await take_one(store.queue, "p1")
    await store.queue.give_back(old, failure=None)
    new = await take_one(store.queue, "p1")

    assert await store.queue.renew((old, new)) == (False, True)
    assert not await store.queue.settle(old, state="decode")
    assert await store.queue.settle(new, state="decode")


async def test_held_jobs_that_the_worker_does_not_know_can_be_given_back(store: Store) -> None:
    for name in ("known", "unknown", "other"):
        await store.queue.enqueue(job(name))
    known, unknown = await take_one(store.queue, "p1"), await take_one(store.queue, "p1")
    other = await take_one(store.queue, "p2")

    num_back = await store.queue.give_back_others("p1", (known,))

    assert num_back == 1
    assert await store.queue.renew((known, unknown, other)) == (True, False, True)
    assert (await store.queue.fates((("unknown", 1),)))[0].detail == "reply lost"
    assert (await take_one(store.queue, "p3")).failures == 0


async def test_fates_say_what_became_of_each_job(store: Store) -> None:
    for name in ("dead", "settled", "taken", "waits"):
        await store.queue.enqueue(job(name))
    dead, settled, _ = [await take_one(store.queue) for _ in range(3)]
    while await store.queue.give_back(dead, failure="engine_error: boom") is None:
        dead = await take_one(store.queue)  # at its old place: the first
    await store.queue.settle(settled, state="decoding")
    await store.queue.cancel("early", 1)
    names = ("dead", "settled", "taken", "waits", "early", "never")

    fates = await store.queue.fates((*((name, 1) for name in names), ("waits", 2)))

    states = ["max_attempts", "decoding", "prefill", "queued", "cancelled", "lost", "lost"]
    assert [fate.state for fate in fates] == states
    assert [fate.is_open for fate in fates] == [False, False, True, True, False, False, False]
    assert fates[0].detail == "engine_error: boom"


async def test_a_job_that_the_queue_ended_has_one_reason_for_whoever_is_told_and_whoever_asks(store: Store) -> None:
    await store.queue.enqueue(job("late", deadline_s=0.0))
    (late,) = (await store.queue.take("p1", max_tokens=10**9, max_jobs=1)).dead
    await store.queue.enqueue(job("failed"))
    failed = None
    while failed is None:
        failed = await store.queue.give_back(await take_one(store.queue), failure="engine_error: boom")
    await store.queue.enqueue(job("stuck", failures=2))
    await take_one(store.queue)
    (stuck,) = await store.expire_leases()

    fates = await store.queue.fates((("late", 1), ("failed", 1), ("stuck", 1)))

    assert [dead.reason for dead in (late, failed, stuck)] == ["deadline", "max_attempts", "max_attempts"]
    assert [(fate.state, fate.detail) for fate in fates] == [(d.reason, d.detail) for d in (late, failed, stuck)]
    assert [CODE_OF_END[fate.state] for fate in fates] == [dead.code for dead in (late, failed, stuck)]


async def test_depth_counts_queued_running_and_dead(store: Store) -> None:
    for number in range(3):
        await store.queue.enqueue(job(f"r{number}"))
    await take_one(store.queue)

    depth = await store.queue.depth()

    assert (depth.queued, depth.running, depth.dead) == (2, 1, 0)
    assert 0 <= depth.oldest_wait_s < LIMIT_S
