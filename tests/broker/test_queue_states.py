"""Random sequences of calls: the memory twin and Redis give the same answers, and both those of a model in which no job
is ever lost, doubled, or held by two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.base import DeadJob, JobLease
from broker.delivery import QueueSettings
from tests.broker.stores import MemoryStore, RedisStore, fake_calls, job, real_calls
from tests.event_sequences import MANY_LIMIT_S, run_many, some
from tests.servers import RedisServer

T = TypeVar("T")
Key = tuple[str, int]
Leases = tuple[JobLease, JobLease]
"""Of the same take: the twin's, Redis's."""
OWNERS = st.sampled_from(["p1", "p2", "p3"])
# Each token is a minute of prefill: the time between two calls doesn't matter for the order. Leases run out at once.
SETTINGS = QueueSettings(lease_s=0.0, max_failures=2, prefill_ms_per_token=60_000.0)


class SameAnswers(RuleBasedStateMachine):
    redis_url = ""
    """Empty: fakeredis."""

    @initialize()
    def connect(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.memory = MemoryStore(SETTINGS)
        self.redis = self.run(self._redis())
        self.leases: list[Leases] = []
        """All that ever were: most are those of zombies."""
        self.num_losses = 0
        self._nothing_is_known()

    def _nothing_is_known(self) -> None:
        self.enqueued: set[Key] = set()
        self.settled: set[Key] = set()
        self.dead: set[Key] = set()
        self.cancelled: set[Key] = set()
        self.holder: dict[Key, Leases] = {}
        self.attempts: Counter[Key] = Counter()
        self.failures: Counter[Key] = Counter()

    async def _redis(self) -> RedisStore:
        calls = await real_calls(self.redis_url) if self.redis_url else fake_calls()
        return RedisStore("redis", calls, SETTINGS)

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

    def of_lease(self, leases: Leases, name: str, **kwargs: Any) -> Any:
        """The same call with each store's own lease."""
        ours, theirs = leases
        answer = self.run(getattr(self.memory.queue, name)(ours, **kwargs))
        assert answer == self.run(getattr(self.redis.queue, name)(theirs, **kwargs))
        return answer

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.fates(tuple(self.enqueued | self.cancelled))
        finally:
            self.run(self.redis.close())
            self.loop.close()

    def key(self, number: int, gen: int) -> Key:
        return f"r{number}.{self.num_losses}", gen

    jobs = st.tuples(st.integers(0, 7), st.integers(1, 2), st.integers(1, 6), st.sampled_from([False] * 6 + [True]))

    @rule(jobs=st.lists(jobs, min_size=1, max_size=4))
    def enqueue(self, jobs: list[tuple[int, int, int, bool]]) -> None:
        for sent in jobs:
            self._enqueue(*sent)

    def _enqueue(self, number: int, gen: int, tokens: int, is_late: bool) -> None:
        key = self.key(number, gen)
        sent = job(key[0], gen=gen, tokens=tokens, deadline_s=0.0 if is_late else 600.0)
        ours, theirs = self.both("enqueue", sent)
        assert (ours is None) == (theirs is None) == (key in self.cancelled)
        if ours is not None:
            self.enqueued.add(key)

    @rule(owner=OWNERS, max_tokens=st.sampled_from([0, 3, 6, 12, 99]), max_jobs=st.integers(0, 4))
    def take(self, owner: str, max_tokens: int, max_jobs: int) -> None:
        ours, theirs = self.both("take", owner, max_tokens=max_tokens, max_jobs=max_jobs)
        assert [_seen(lease) for lease in ours.leases] == [_seen(lease) for lease in theirs.leases]
        assert ours.dead == theirs.dead
        self._count_dead(ours.dead)
        for leases in zip(ours.leases, theirs.leases, strict=True):
            key = _key_of(leases)
            assert key in self.enqueued - self.settled - self.dead - self.cancelled
            assert key not in self.holder, "two hold it"
            self.attempts[key] += 1
            assert (leases[0].pair.attempt, leases[0].failures) == (self.attempts[key], self.failures[key])
            self.leases.append(leases)
            self.holder[key] = leases

    def _any_lease(self, data: st.DataObject) -> Leases:
        """Half of the time one that holds."""
        holders = [leases for leases in self.leases if self._is_held(leases)]
        return data.draw(st.sampled_from(holders if holders and data.draw(st.booleans()) else self.leases))

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        if self.leases:
            ours, theirs = leases = self._any_lease(data)
            kept = self.run(self.memory.queue.renew((ours,)))
            assert kept == self.run(self.redis.queue.renew((theirs,))) == (self._is_held(leases),)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        if self.leases:
            self._settle(self._any_lease(data))

    def _settle(self, leases: Leases) -> None:
        assert self.of_lease(leases, "settle", state="decode") == self._is_held(leases)
        if self._is_held(leases):
            self.settled.add(_key_of(leases))
            del self.holder[_key_of(leases)]

    @rule(data=st.data(), failure=st.sampled_from([None, "engine crashed"]))
    def give_back(self, data: st.DataObject, failure: str | None) -> None:
        if self.leases:
            self._give_back(self._any_lease(data), failure)

    def _give_back(self, leases: Leases, failure: str | None) -> None:
        dead = self.of_lease(leases, "give_back", failure=failure)
        lost = [_key_of(leases)] if self._is_held(leases) else []
        self._lost(lost, () if dead is None else (dead,), is_failure=failure is not None)

    @rule(owner=OWNERS, end=st.sampled_from(["keep", "settle", "give back", "fail", "fail"]))
    def serve(self, owner: str, end: str) -> None:
        """The usual way, up to some end."""
        num_before = len(self.leases)
        self.take(owner, 99, 3)
        for leases in self.leases[num_before:]:
            if end == "settle":
                self._settle(leases)
            elif end != "keep":
                self._give_back(leases, "engine crashed" if end == "fail" else None)

    @rule(owner=OWNERS, data=st.data())
    def give_back_others(self, owner: str, data: st.DataObject) -> None:
        held = sorted(key for key, leases in self.holder.items() if leases[0].owner == owner)
        keep = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        kept = [self.holder[key] for key in keep]
        num_back = self.run(self.memory.queue.give_back_others(owner, tuple(ours for ours, _ in kept)))
        assert num_back == self.run(self.redis.queue.give_back_others(owner, tuple(theirs for _, theirs in kept)))
        assert num_back == len(held) - len(keep)
        self._lost([key for key in held if key not in keep], (), is_failure=False)

    @rule()
    def reap(self) -> None:
        ours, theirs = self.both("reap")
        assert ours.num_put_back == theirs.num_put_back
        assert sorted(ours.dead, key=str) == sorted(theirs.dead, key=str)
        self._lost(list(self.holder), ours.dead, is_failure=True)

    @rule()
    def reap_before_any_lease_has_run_out(self) -> None:
        assert self.run(self.redis.other(lease_s=600.0).reap()).dead == ()

    @rule(number=st.integers(0, 9), gen=st.integers(1, 2))
    def cancel(self, number: int, gen: int) -> None:
        key = self.key(number, gen)
        owner = self.same("cancel", *key)
        assert owner == (self.holder[key][0].owner if key in self.holder else None)
        if key not in self.settled | self.dead:
            self.cancelled.add(key)
            self.holder.pop(key, None)

    @rule(number=st.integers(0, 9), gen=st.integers(1, 2))
    def fate(self, number: int, gen: int) -> None:
        self.fates((self.key(number, gen),))

    def fates(self, keys: tuple[Key, ...]) -> None:
        for key, ours, theirs in zip(keys, *self.both("fates", keys), strict=True):
            assert ours.state == theirs.state
            assert ours.state in self._states_of(key)

    @rule(owner=OWNERS)
    def leave(self, owner: str) -> None:
        has_none = all(leases[0].owner != owner for leases in self.holder.values())
        assert self.same("leave", owner) == has_none

    @rule(lost=st.sampled_from(["nothing"] * 8 + ["scripts", "everything"]))
    def redis_loses(self, lost: str) -> None:
        """Whoever enqueues again after a loss takes a new gen, here a new name."""
        if lost == "scripts":
            self.run(self.redis.calls.call("SCRIPT", "FLUSH"))
        if lost == "everything":
            self.run(self.redis.calls.call("FLUSHALL"))
            now_s, self.memory = self.memory.now_s, MemoryStore(SETTINGS)
            self.memory.now_s = now_s + 1.0  # entry ids are not used again
            self.num_losses += 1
            self._nothing_is_known()

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "loop"):
            return
        ours, theirs = self.run(self.memory.leftovers()), self.run(self.redis.leftovers())
        num_left = len(self.enqueued) - len(self.settled) - len(self.dead) - len(self.cancelled & self.enqueued)
        assert ours == theirs == (num_left, len(self.holder), num_left - len(self.holder))
        assert not self.settled & self.dead
        assert not self.settled & self.cancelled
        assert not self.dead & self.cancelled

    def _is_held(self, leases: Leases) -> bool:
        return self.holder.get(_key_of(leases)) is leases

    def _lost(self, keys: list[Key], dead: tuple[DeadJob, ...], *, is_failure: bool) -> None:
        """Leases that ended; `dead`: what the store says has thereby failed too often."""
        for key in keys:
            del self.holder[key]
            self.failures[key] += is_failure
        given_up = {key for key in keys if is_failure and self.failures[key] >= SETTINGS.max_failures}
        assert {(ended.request_id, ended.pair.gen) for ended in dead} == given_up
        self._count_dead(dead)

    def _count_dead(self, dead: tuple[DeadJob, ...]) -> None:
        for ended in dead:
            key = ended.request_id, ended.pair.gen
            assert key in self.enqueued - self.settled - self.dead - self.cancelled
            self.dead.add(key)

    def _states_of(self, key: Key) -> set[str]:
        if key in self.settled:
            return {"decode"}
        if key in self.dead:
            return {"max_attempts", "deadline"}
        if key in self.cancelled:
            return {"cancelled"}
        if key in self.enqueued:
            return {"prefill"} if key in self.holder else {"queued"}
        return {"lost"}


def _key_of(leases: Leases) -> Key:
    return leases[0].job.request_id, leases[0].job.gen


def _seen(lease: JobLease) -> tuple[object, ...]:
    return lease.job, lease.owner, lease.pair, lease.failures


TestSameAnswers = some(SameAnswers, 60, num_steps=40)


@pytest.mark.long
@pytest.mark.timeout(MANY_LIMIT_S)
def test_ten_thousand_sequences(redis_server: RedisServer) -> None:
    class OnRedis(SameAnswers):
        redis_url = redis_server.url

    run_many(OnRedis, num_steps=40)
