"""Prefill workers, each with one job in its hands, and each at another point of that job's life."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.stage import Stage, Worker
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger, Line


@dataclass(slots=True, kw_only=True)
class Positions:
    """`at[point]` stands there, with the request `asking[point]`. `other` stands before its first take."""

    decode: Worker
    other: Worker
    at: dict[str, Worker]
    asking: dict[str, asyncio.Task[Line]] = field(default_factory=dict)

    @property
    def pending(self) -> list[asyncio.Task[Line]]:
        return [task for task in self.asking.values() if not task.done()]


async def take_positions(stage: Stage, ledger: Ledger, points: Sequence[str]) -> Positions:
    """`points` of `Points`, of the prefill worker or its engine; and

    - `before settle`: its request has been answered already
    - `half read`: the decode worker stands there, in the transfer of this worker's job; no later one may transfer
    - `claimed`: nobody renews the lease yet, and whoever takes next may get this job; only before `queued`
    - `queued`: the worker stands before the take; only as the last one

    The decode worker reads from one worker at a time, and the queue gives the next job to whoever asks.
    """
    decode = await stage.spawn("decode", stops_at=["half read"])
    decode.let("half read")
    other = await stage.spawn("prefill", stops_at=["before take"])
    own = {point: {"before take", "claimed", point} - {"queued", "half read"} for point in points}
    at = {point: await stage.spawn("prefill", stops_at=own[point]) for point in points}
    await stage.serving(*stage.workers)
    await stage.ready()
    positions = Positions(decode=decode, other=other, at=at)
    for number, (point, worker) in enumerate(at.items()):
        await worker.reached("before take")
        prompt = f"{number} {point} " * 40
        if point != "queued":
            worker.let("before take")
        if point == "half read":
            decode.hold("half read")
        asking = asyncio.create_task(ledger.ask(prompt, max_tokens=40, stream=number % 2 == 0), name=point)
        positions.asking[point] = asking
        if point == "queued":
            await _queued(stage)
        elif point == "claimed":
            await worker.reached(point)
        else:
            await stage.taken(worker)
            await (decode if point == "half read" else worker).reached(point)
        if point == "before settle":
            await asking
    return positions


async def _queued(stage: Stage) -> None:
    async def not_queued() -> str:
        count = await stage.pipeline.redis.zcard(stage.pipeline.key("ready"))
        return "" if count else "the queue is empty"

    await eventually(not_queued, limit_s=60, what="queued job")
