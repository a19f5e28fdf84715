"""Random sequences of calls: the memory twin and Redis give the same answers, and no job is ever lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.base import DeadJob, JobLease
from broker.delivery import QueueSettings
from tests.broker.stores import MemoryStore, RedisStore, fake_calls, job

T = TypeVar("T")
OWNERS = st.sampled_from(["p1", "p2", "p3"])
# Each token is a second of prefill: moments between two calls don't matter for the order. Leases run out at once.
SETTINGS = QueueSettings(lease_s=0.0, max_failures=2, prefill_ms_per_token=1000.0)


class SameAnswers(RuleBasedStateMachine):
    @initialize()
    def connect(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = MemoryStore(SETTINGS)
        self.redis = self.run(self._redis())
        self.leases: list[tuple[JobLease, JobLease]] = []
        self.enqueued: set[tuple[str, int]] = set()
        self.settled: set[tuple[str, int]] = set()
        self.dead: set[tuple[str, int]] = set()
        self.cancelled: set[tuple[str, int]] = set()

    async def _redis(self) -> RedisStore:
        return RedisStore("fakeredis", fake_calls(), SETTINGS)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def both(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (
            self.run(getattr(self.memory.queue, name)(*args, **kwargs)),
            self.run(getattr(self.redis.queue, name)(*args, **kwargs)),
        )

    def same(self, name: str, *args: Any, **kwargs: Any) -> Any:
        ours, theirs = self.both(name, *args, **kwargs)
        assert ours == theirs
        return ours

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.redis.close())
            self.loop.close()

    @rule(number=st.integers(0, 5), gen=st.integers(1, 2), tokens=st.integers(1, 6), is_late=st.booleans())
    def enqueue(self, number: int, gen: int, tokens: int, is_late: bool) -> None:
        sent = job(f"r{number}", gen=gen, tokens=tokens, deadline_s=0.0 if is_late and tokens == 1 else 600.0)
        ours, theirs = self.both("enqueue", sent)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            self.enqueued.add((sent.request_id, gen))

    @rule(owner=OWNERS, max_tokens=st.integers(0, 12), max_jobs=st.integers(0, 3))
    def take(self, owner: str, max_tokens: int, max_jobs: int) -> None:
        ours, theirs = self.both("take", owner, max_tokens=max_tokens, max_jobs=max_jobs)
        assert [_seen(lease) for lease in ours.leases] == [_seen(lease) for lease in theirs.leases]
        assert ours.dead == theirs.dead
        self.leases += zip(ours.leases, theirs.leases, strict=True)
        self._count_dead(ours.dead)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if self.leases:
            ours, theirs = data.draw(st.sampled_from(self.leases))
            assert self.run(self.memory.queue.renew((ours,))) == self.run(self.redis.queue.renew((theirs,)))

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.leases:
            ours, theirs = data.draw(st.sampled_from(self.leases))
            is_settled = self.run(self.memory.queue.settle(ours, state="decode"))
            assert is_settled == self.run(self.redis.queue.settle(theirs, state="decode"))
            if is_settled:
                assert (ours.job.request_id, ours.job.gen) not in self.settled
                self.settled.add((ours.job.request_id, ours.job.gen))

    @rule(data=st.data(), failure=st.sampled_from([None, "engine crashed"]))
    def give_back(self, data: st.DataObject, failure: str | None) -> None:
        if self.leases:
            ours, theirs = data.draw(st.sampled_from(self.leases))
            dead = self.run(self.memory.queue.give_back(ours, failure=failure))
            assert dead == self.run(self.redis.queue.give_back(theirs, failure=failure))
            self._count_dead(() if dead is None else (dead,))

    @rule(owner=OWNERS)
    def give_back_others(self, owner: str) -> None:
        self.same("give_back_others", owner, ())

    @rule()
    def reap(self) -> None:
        ours, theirs = self.both("reap")
        assert sorted(ours, key=str) == sorted(theirs, key=str)
        self._count_dead(ours)

    @rule(number=st.integers(0, 5), gen=st.integers(1, 2))
    def cancel(self, number: int, gen: int) -> None:
        key = (f"r{number}", gen)
        self.same("cancel", *key)
        if key in self.enqueued - self.settled - self.dead:
            self.cancelled.add(key)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "loop"):
            return
        ours, theirs = self.run(self.memory.leftovers()), self.run(self.redis.leftovers())
        num_pending = len(self.enqueued) - len(self.settled) - len(self.dead) - len(self.cancelled)
        assert ours == theirs
        assert ours[0] == ours[1] + ours[2] == num_pending
        assert not self.settled & self.dead
        assert not self.settled & self.cancelled

    def _count_dead(self, dead: tuple[DeadJob, ...]) -> None:
        self.dead |= {(ended.request_id, ended.pair.gen) for ended in dead}


def _seen(lease: JobLease) -> tuple[object, ...]:
    return lease.job, lease.owner, lease.pair, lease.failures


TestSameAnswers = SameAnswers.TestCase
TestSameAnswers.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
