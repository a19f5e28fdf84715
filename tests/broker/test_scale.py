"""What operators ask of each `pdq up`, on every Redis kind: wishes, states, drains, and that nothing is left behind."""

from __future__ import annotations

import pytest

from broker.base import WorkerRecord
from broker.redis_replies import text
from broker.redis_scale import RedisScale, ScaleRow, UpState, Wish
from broker.registry_settings import RegistrySettings
from tests.broker.stores import MODEL, RedisStore

ROW = "box:/srv/.pdq"
ONE = Wish(prefill=1, decode=1)
STATE = UpState(host="box", prefill=1, decode=1, pids="41,42", wish=str(ONE))


def worker(worker_id: str, role: str = "prefill") -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, role=role, state="ready", endpoint="e", model=MODEL, fingerprint="f")


@pytest.fixture
def scale(redis_store: RedisStore) -> RedisScale:
    return RedisScale(redis_store.calls, MODEL, RegistrySettings())


async def row_of(scale: RedisScale) -> ScaleRow:
    (row,) = await scale.rows()
    return row


async def test_a_wish_is_heard_at_the_next_beat(scale: RedisScale) -> None:
    first = await scale.beat(ROW, STATE, ONE, is_new=True)
    asked = await scale.ask(await row_of(scale), Wish(prefill=3, decode=2))
    second = await scale.beat(ROW, STATE, ONE)

    assert (first, asked, second) == (ONE, Wish(prefill=3, decode=2), Wish(prefill=3, decode=2))
    assert await row_of(scale) == ScaleRow(name=ROW, wish=Wish(prefill=3, decode=2), state=STATE)


async def test_the_row_is_readable_and_lives_as_long_as_its_pdq_up(redis_store: RedisStore, scale: RedisScale) -> None:
    await scale.beat(ROW, STATE, Wish(prefill=3, decode=2), is_new=True)

    row = await redis_store.calls.call("HGET", scale.keys.scale, ROW)
    lives_ms = [await redis_store.calls.call("PTTL", key) for key in (scale.keys.scale, scale.keys.up(ROW))]
    await scale.leave(ROW)

    assert text(row) == "prefill=3 decode=2"
    assert all(0 < live_ms <= 3000 for live_ms in lives_ms)
    assert await redis_store.calls.call("EXISTS", scale.keys.scale, scale.keys.up(ROW)) == 0


async def test_a_pdq_up_that_starts_again_wants_what_its_own_flags_say(scale: RedisScale) -> None:
    await scale.beat(ROW, STATE, Wish(prefill=3, decode=2), is_new=True)

    assert await scale.beat(ROW, STATE, ONE, is_new=True) == ONE


async def test_after_a_loss_of_data_it_brings_its_wish_again(redis_store: RedisStore, scale: RedisScale) -> None:
    await scale.beat(ROW, STATE, ONE, is_new=True)
    await redis_store.calls.call("FLUSHALL")

    wish = await scale.beat(ROW, STATE, Wish(prefill=3, decode=2))

    assert wish == (await row_of(scale)).wish == Wish(prefill=3, decode=2)


async def test_the_row_of_a_silent_pdq_up_is_dropped_by_another(redis_store: RedisStore, scale: RedisScale) -> None:
    await scale.beat("gone:/x", STATE, ONE, is_new=True)
    await redis_store.calls.call("UNLINK", scale.keys.up("gone:/x"))  # as its TTL does

    await scale.beat(ROW, STATE, ONE, is_new=True)

    assert await redis_store.calls.call("HLEN", scale.keys.scale) == 1


async def test_nobody_can_be_asked_who_is_gone(scale: RedisScale) -> None:
    await scale.beat(ROW, STATE, ONE, is_new=True)
    row = await row_of(scale)
    await scale.leave(ROW)

    assert await scale.ask(row, Wish(prefill=2, decode=2)) is None


async def test_of_two_operators_the_second_sees_the_first_ones_wish(scale: RedisScale) -> None:
    await scale.beat(ROW, STATE, ONE, is_new=True)
    row = await row_of(scale)

    await scale.ask(row, Wish(prefill=2, decode=1))

    assert await scale.ask(row, Wish(prefill=1, decode=9)) == Wish(prefill=2, decode=1)


async def test_a_drained_worker_is_wanted_no_more_and_counts_once(redis_store: RedisStore, scale: RedisScale) -> None:
    drained, other = worker("prefill-box-41-a"), worker("prefill-box-43-b")
    for record in (drained, other):
        await redis_store.registry.heartbeat(record)
    await scale.beat(ROW, STATE, Wish(prefill=2, decode=1), is_new=True)
    row = await row_of(scale)

    answers = [await scale.drain(drained, row), await scale.drain(drained, row)]

    assert answers == [True, True]
    assert (await row_of(scale)).wish == ONE
    ids = (drained.worker_id, other.worker_id)
    assert await scale.asked_to_drain(ids) == {drained.worker_id}
    assert await redis_store.registry.heartbeat(drained)
    assert not await redis_store.registry.heartbeat(other)


async def test_a_worker_that_nobody_keeps_running_changes_no_wish(redis_store: RedisStore, scale: RedisScale) -> None:
    record = worker("decode-far-7-c", "decode")
    await redis_store.registry.heartbeat(record)
    await scale.beat(ROW, STATE, ONE, is_new=True)

    assert await scale.drain(record, None)
    assert not await scale.drain(worker("decode-far-8-d", "decode"), await row_of(scale))
    assert (await row_of(scale)).wish == ONE


def test_a_state_knows_its_own_workers_by_host_and_pid() -> None:
    assert STATE.runs("prefill-box-42-0a1b")
    assert not STATE.runs("prefill-box-4-0a1b")
    assert not STATE.runs("prefill-other-42-0a1b")
    assert not STATE.runs("nonsense")


@pytest.mark.parametrize(("prefill", "decode"), [(-1, 1), (1, 257)])
def test_senseless_numbers_are_refused(prefill: int, decode: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 256"):
        Wish(prefill=prefill, decode=decode)
