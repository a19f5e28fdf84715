"""A take of several calls, the last of which is never answered."""

from __future__ import annotations

import pytest

from broker.errors import QueueUnavailable
from tests.broker.stores import RedisStore, job

ANY = 10**9


async def test_a_take_whose_last_call_got_no_answer_says_that_it_may_hold_unknown_jobs(
    redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = redis_store.other(take_scan_max=1)
    await queue.enqueue(job("late", deadline_s=0.0))
    await queue.enqueue(job("fine"))
    take_once, calls = queue._take_once, []

    async def answer_lost(*arguments: object) -> object:
        reply = await take_once(*arguments)
        calls.append(reply)
        if len(calls) == 2:
            raise QueueUnavailable("the answer was lost")
        return reply

    monkeypatch.setattr(queue, "_take_once", answer_lost)
    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert [dead.request_id for dead in taken.dead] == ["late"]
    assert (taken.leases, taken.is_unsure) == ((), True)
    assert await queue.give_back_others("p1", ()) == 1
