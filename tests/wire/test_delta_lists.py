"""Frames that list what a decode worker has open: regularly, whatever else is sent, and never heaped up."""

from __future__ import annotations

import asyncio

from broker.links import DeltaSender, DeltaSettings
from tests.broker.stores import eventually
from tests.wire.test_delta_links import LIMIT_S, QUICK, Gateway, delta


async def test_signs_of_life_begin_when_a_request_is_admitted_and_list_what_is_open() -> None:
    gateway = await Gateway().start()
    open_ids = ["a", "b"]
    sender = DeltaSender(QUICK, worker_id="d", on_overflow=lambda _: None, owes=lambda _: tuple(open_ids))

    sender.open(gateway.inbox.endpoint)
    await gateway.until(lambda: gateway.lists)
    assert gateway.frames[0] == 1
    assert gateway.lists[0] == ("a", "b")
    open_ids.remove("a")
    await gateway.until(lambda: gateway.lists[-1] == ("b",))

    await sender.close()
    await gateway.close()


async def test_lists_come_between_tokens_too_and_next_frame_says_from_which_on_they_know() -> None:
    gateway = await Gateway().start()
    sender = DeltaSender(QUICK, worker_id="d", on_overflow=lambda _: None, owes=lambda _: ("a",))
    endpoint = gateway.inbox.endpoint
    assert sender.next_frame(endpoint) == 1

    async with asyncio.timeout(LIMIT_S):
        step = 0
        while len(gateway.lists) < 3:
            step += 1
            sender.push(endpoint, step, (delta(step - 1),))
            await asyncio.sleep(0.01)
    assert await sender.drained(LIMIT_S)
    assert gateway.seqs == list(range(step))

    async def has_told_all() -> bool:
        return sender.next_frame(endpoint) == max(gateway.frames) + 1

    await eventually(has_told_all)  # signs of life go on: one may be on its way
    sender.drop(endpoint)
    assert await has_told_all(), "numbering goes on"
    await sender.close()
    await gateway.close()


async def test_to_a_gateway_that_does_not_acknowledge_only_one_list_is_kept() -> None:
    gateway = await Gateway().start()
    gateway.is_deaf = True
    sender = DeltaSender(QUICK, worker_id="d", on_overflow=lambda _: None, owes=lambda _: ())

    sender.open(gateway.inbox.endpoint)
    await gateway.until(lambda: gateway.num_ignored >= 8)  # repeats, which come at twice the pace of lists at least

    assert sender.num_unacknowledged(gateway.inbox.endpoint) <= 2
    await sender.close()
    await gateway.close()


async def test_a_link_is_not_closed_for_idleness_while_something_is_owed() -> None:
    gateway = await Gateway().start()
    settings = DeltaSettings(sign_of_life_s=0.05, delta_ack_s=0.01, delta_link_idle_s=0.1)
    open_ids = ["a"]
    sender = DeltaSender(settings, worker_id="d", on_overflow=lambda _: None, owes=lambda _: tuple(open_ids))

    sender.open(gateway.inbox.endpoint)
    await gateway.until(lambda: len(gateway.lists) > 5)
    open_ids.clear()

    async def is_closed() -> bool:
        return len(sender) == 0

    await eventually(is_closed)
    await sender.close()
    await gateway.close()
