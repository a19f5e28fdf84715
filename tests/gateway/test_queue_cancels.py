"""A cancel that the queue did not hear is said again when it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.memory import MemoryQueue
from gateway.queue_cancels import QueueCancels
from pdq.runtime.background import Background
from tests.broker.stores import LIMIT_S, eventually, job


class DeafQueue(MemoryQueue):
    is_away = False
    is_silent = False
    num_calls = 0

    async def cancel(self, request_id: str, gen: int) -> str | None:
        self.num_calls += 1
        if self.is_silent:
            await asyncio.sleep(3600)
        if self.is_away:
            raise QueueUnavailable("away")
        return await super().cancel(request_id, gen)


@pytest.fixture
async def background() -> AsyncIterator[Background]:
    background = Background()
    yield background
    await background.close()


def cancels_of(
    queue: DeafQueue, background: Background, owners: list[str], *, give_up_s: float = 600, max_owed: int = 1000
) -> QueueCancels:
    return QueueCancels(
        queue,
        background,
        timeout_s=0.05,
        give_up_s=give_up_s,
        on_owner=lambda owner, request_id, gen: owners.append(f"{owner} {request_id} {gen}"),
        max_owed=max_owed,
    )


@pytest.mark.parametrize("trouble", ["is_away", "is_silent"])
async def test_what_was_cancelled_while_the_queue_was_away_is_out_of_it_when_it_is_back(
    background: Background, trouble: str
) -> None:
    queue, owners = DeafQueue(QueueSettings()), list[str]()
    cancels = cancels_of(queue, background, owners)
    for number in range(200):
        await queue.enqueue(job(f"r{number}"))
    await queue.take("prefill-1", max_tokens=4, max_jobs=1)
    setattr(queue, trouble, True)
    for number in range(200):
        cancels.cancel(f"r{number}", 1)

    async def are_owed() -> bool:
        return len(cancels) == 200

    await eventually(are_owed)

    setattr(queue, trouble, False)

    await background.settled(LIMIT_S)
    depth = await queue.depth()
    assert (depth.queued, depth.running, len(cancels)) == (0, 0, 0)
    assert owners == ["prefill-1 r0 1"]


async def test_cancels_beyond_the_limit_are_given_up_oldest_first(background: Background) -> None:
    queue = DeafQueue(QueueSettings())
    queue.is_away = True
    cancels = cancels_of(queue, background, [], max_owed=2)
    for number in range(3):
        await queue.enqueue(job(f"r{number}"))
        cancels.cancel(f"r{number}", 1)

    async def all_were_said_in_vain() -> bool:
        return queue.num_calls >= 3 and len(cancels) == 2

    await eventually(all_were_said_in_vain)

    queue.is_away = False
    await background.settled(LIMIT_S)

    assert [queue.state_of(f"r{number}", 1) for number in range(3)] == ["queued", "cancelled", "cancelled"]


async def test_a_cancel_is_not_said_for_longer_than_a_job_lives(background: Background) -> None:
    queue = DeafQueue(QueueSettings())
    queue.is_away = True
    cancels = cancels_of(queue, background, [], give_up_s=0.3)

    cancels.cancel("r", 1)

    async def is_forgotten() -> bool:
        return queue.num_calls > 1 and len(cancels) == 0

    await eventually(is_forgotten)
    await background.settled(LIMIT_S)
