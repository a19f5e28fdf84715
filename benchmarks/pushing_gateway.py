"""A gateway that decides at arrival: it pushes each prompt into the FIFO of one prefill worker. The baseline.

    python -m benchmarks.pushing_gateway POLICY NUM_WORKERS [gateway flags]

Everything but the choice is the product's code: each FIFO is a queue of its own in the same Redis, read by one worker
(`pushed_worker.py`). Policies: round_robin; two_choices (of two random workers the one with fewer requests);
least_loaded (fewest prompt tokens). A request counts as outstanding until a decode worker has its KV (Admit).
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable

import gateway.main as gateway_main
from broker.base import JobFate, PrefillJob, QueueDepth
from broker.delivery import QueueSettings
from broker.links import NoticeInbox, NoticeReply
from broker.messages import Admit, Notice
from broker.redis_calls import RedisCalls
from broker.redis_queue import RedisPrefillQueue

POLICIES = ("round_robin", "two_choices", "least_loaded")


def fifo_name(model: str, number: int) -> str:
    """Queue name of prefill worker `number`."""
    return f"{model}.fifo-{number}"


class Dispatcher:
    """What is outstanding where, and who gets the next one."""

    def __init__(self, policy: str, num_workers: int) -> None:
        self._policy = policy
        self._next = 0
        self._rng = random.Random(0)
        self._tokens = [0] * num_workers
        self._requests = [0] * num_workers
        self._placed: dict[str, tuple[int, int]] = {}

    def place(self, request_id: str, num_tokens: int) -> int:
        workers = range(len(self._tokens))
        if self._policy == "round_robin":
            number = self._next
            self._next = (self._next + 1) % len(self._tokens)
        elif self._policy == "two_choices":
            number = min(self._rng.sample(workers, 2), key=lambda n: self._requests[n])
        else:
            number = min(workers, key=lambda n: (self._tokens[n], self._rng.random()))
        self._tokens[number] += num_tokens
        self._requests[number] += 1
        self._placed[request_id] = (number, num_tokens)
        return number

    def done(self, request_id: str) -> None:
        """Idempotent."""
        if request_id in self._placed:
            number, num_tokens = self._placed.pop(request_id)
            self._tokens[number] -= num_tokens
            self._requests[number] -= 1


class PushQueue:
    """The queue port's gateway half over one FIFO per worker."""

    def __init__(
        self, dispatcher: Dispatcher, num_workers: int, calls: RedisCalls, model: str, settings: QueueSettings
    ) -> None:
        self._dispatcher = dispatcher
        self._fifos = [RedisPrefillQueue(calls, fifo_name(model, n), settings) for n in range(num_workers)]
        self._fifo_of: dict[str, int] = {}

    async def enqueue(self, job: PrefillJob) -> str | None:
        number = self._fifo_of[job.request_id] = self._dispatcher.place(job.request_id, job.num_tokens)
        return await self._fifos[number].enqueue(job)

    async def cancel(self, request_id: str, gen: int) -> str | None:
        self._dispatcher.done(request_id)
        return await self._fifos[self._fifo_of[request_id]].cancel(request_id, gen)

    async def fates(self, requests: tuple[tuple[str, int], ...]) -> tuple[JobFate, ...]:
        found: list[JobFate] = []
        for request in requests:
            found += await self._fifos[self._fifo_of[request[0]]].fates((request,))
        return tuple(found)

    async def depth(self) -> QueueDepth:
        return await self._fifos[0].depth()  # for its metrics only, which nobody reads here

    async def close(self) -> None:
        for fifo in self._fifos:
            await fifo.close()


class WatchingInbox(NoticeInbox):
    """Tells the dispatcher of each Admit before the gateway hears of it."""

    dispatcher: Dispatcher

    async def start(self, handler: Callable[[Notice, NoticeReply], None]) -> None:
        def watch(message: Notice, reply: NoticeReply) -> None:
            if isinstance(message, Admit):
                self.dispatcher.done(message.request_id)
            handler(message, reply)

        await super().start(watch)


def main() -> int:
    policy, num_workers = sys.argv[1], int(sys.argv[2])
    if policy not in POLICIES:
        raise SystemExit(f"policy {policy!r}: one of {', '.join(POLICIES)}")
    dispatcher = Dispatcher(policy, num_workers)
    WatchingInbox.dispatcher = dispatcher
    gateway_main.RedisPrefillQueue = functools.partial(PushQueue, dispatcher, num_workers)  # type: ignore[misc,assignment]
    gateway_main.NoticeInbox = WatchingInbox  # type: ignore[misc]
    return gateway_main.main(sys.argv[3:])


if __name__ == "__main__":
    raise SystemExit(main())
