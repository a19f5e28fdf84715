"""What must hold when the dust has settled, whatever was killed or stopped.

I1  every accepted request got exactly one terminal answer                       (the ledger)
I2  no answer repeats, drops or changes a token                                  (the ledger)
I3  stream entries: enqueued = settled + dead + pending                          (`Books`)
I4  nothing pending, KV pools full again, no key, consumer or socket left over   (`Books`, `Pipeline.quiet`)
I5  recovery within lease + heartbeat                                            (each test that kills or stops)
I6  no KV byte read or written after its block was freed: the simulated engine says `kv_bytes_wrong`  (the logs)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import psutil

from tests.faults.stage import Stage
from tests.pipeline import books, process_logs
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger
from tests.pipeline.leftovers import consumers_of_the_dead, lasting_keys


@dataclass(slots=True, kw_only=True)
class Books:
    """The queue's books since `open_books`: every stream entry is accounted for."""

    pipeline: Pipeline
    num_added: int
    """Entries that the stream had ever had at the beginning."""
    since_ms: int
    """Redis time of the beginning."""
    num_foreign: int = 0
    """Entries that the test put in by hand, of which there are no requests."""

    async def balanced(self) -> None:
        """I3, at any time. Read in one go, or what happens meanwhile looks like a difference."""
        states = await books.states(self.pipeline, since_ms=self.since_ms)
        added = await books.num_added(self.pipeline) - self.num_added - self.num_foreign
        assert sum(states.values()) == added, f"{added} entries were added, {dict(states)} are known"

    async def closed(self) -> None:
        """I3 and I4, once everything has ended."""
        await self.pipeline.quiet()
        states = await books.states(self.pipeline, since_ms=self.since_ms)
        assert set(states) <= books.ENDED, f"not ended: {dict(states)}"
        await self.balanced()
        await eventually(self._left_over, limit_s=40, what="clean Redis")

    async def _left_over(self) -> str:
        found = [f"key {name} without TTL" for name in sorted(await lasting_keys(self.pipeline))]
        return "; ".join(found + [f"consumer {name}" for name in sorted(await consumers_of_the_dead(self.pipeline))])


async def open_books(pipeline: Pipeline) -> Books:
    seconds, microseconds = await pipeline.redis.time()
    added = await books.num_added(pipeline)
    return Books(pipeline=pipeline, num_added=added, since_ms=seconds * 1000 + microseconds // 1000)


async def nobody_asks(before: set[asyncio.Task[Any]]) -> None:
    """Ends the requests that a test has left running beside the tasks `before` it, as one that failed does."""
    new = asyncio.all_tasks() - before
    left = [task for task in new if getattr(task.get_coro(), "__qualname__", "") == Ledger.ask.__qualname__]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def request_hashes(pipeline: Pipeline) -> dict[bytes, dict[bytes, bytes]]:
    """What Redis tells of every request: another owner, attempt, state or time is an effect that somebody had."""
    return {key: await pipeline.redis.hgetall(key) async for key in pipeline.redis.scan_iter(pipeline.key("req:*"))}


def clean_logs(stage: Stage) -> None:
    """No process logged an error or a traceback that the test did not provoke; and none a wrong KV byte (I6)."""
    for log_dir in (stage.log_dir, stage.pipeline.log_dir):
        assert not process_logs.events(log_dir, "kv_bytes_wrong")
    found = process_logs.faults(stage.log_dir, allowed=stage.allowed_faults)
    assert not found, "\n".join(found[:10])


async def sockets_released(stage: Stage) -> None:
    """I4: the gateway and the workers that live hold no connection that its other end has closed."""
    pids = [child.pid for child in stage.pipeline.deployment.children if child.pid]
    pids += [worker.process.pid for worker in stage.workers if worker.process.returncode is None]

    async def half_closed() -> str:
        found = [
            f"{pid}: {connection.laddr} -> {connection.raddr}"
            for pid in pids
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.status == psutil.CONN_CLOSE_WAIT
        ]
        return "; ".join(found)

    await eventually(half_closed, limit_s=30, what="released sockets")
