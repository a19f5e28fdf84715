"""`pdq scale` and `pdq drain`, against processes that the test beats for."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from broker.redis_scale import RedisScale, ScaleRow, UpState, Wish
from tests.cli.conftest import LIMIT_S
from tests.cli.operators import ROW, Field, field_of, worker
from tests.servers import RedisServer

STATE = UpState(host="box", prefill=1, decode=1, pids="41,42", wish="prefill=1 decode=1")
P, D, G = "prefill-box-41-aa", "decode-box-42-bb", "gateway-box-43-cc"


async def asked(field: Field) -> Wish:
    async with asyncio.timeout(LIMIT_S):
        while field.wish == Wish(prefill=1, decode=1):  # noqa: ASYNC110 - asked by another thread
            await asyncio.sleep(0.01)
    return field.wish


async def printed_until(capsys: pytest.CaptureFixture[str], text: str) -> str:
    printed = ""
    async with asyncio.timeout(LIMIT_S):
        while text not in printed:
            await asyncio.sleep(0.01)  # printed by another thread
            printed += capsys.readouterr().out
    return printed


async def test_scale_asks_and_waits_until_it_is_so(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, state=STATE) as field:
        command = asyncio.create_task(field.run("scale", "prefill=3", "decode=2"))
        wish = await asked(field)
        field.state = dataclasses.replace(STATE, wish=str(wish), starting=3)
        printed = await printed_until(capsys, "3 starting")
        is_waiting = not command.done()
        field.state = dataclasses.replace(STATE, wish=str(wish), prefill=3, decode=2)
        code = await command

    assert (wish, is_waiting, code) == (Wish(prefill=3, decode=2), True, 0)
    printed += capsys.readouterr().out
    assert f"{ROW}: asked for prefill=3 decode=2 (was prefill=1 decode=1)" in printed
    assert "prefill 1 of 3 ready, decode 1 of 2 ready, 3 starting" in printed
    assert printed.splitlines()[-1].endswith("prefill 3 of 3 ready, decode 2 of 2 ready")


async def test_a_role_that_is_not_named_stays_as_it_is(private_redis: RedisServer) -> None:
    async with field_of(private_redis, state=STATE) as field:
        assert await field.run("scale", "decode=4", "--no-wait") == 0
        assert await asked(field) == Wish(prefill=1, decode=4)


async def test_why_it_is_not_reached_is_said(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with field_of(private_redis, state=STATE) as field:
        command = asyncio.create_task(field.run("scale", "prefill=2"))
        await asked(field)
        field.state = dataclasses.replace(STATE, problem="prefill-2 can't start: no memory")
        async with asyncio.timeout(LIMIT_S):
            while not (row := (await field.scale.rows())[0]).state.problem:  # noqa: ASYNC110 - told with the next beat
                await asyncio.sleep(0.01)
        await field.scale.ask(row, Wish(prefill=1, decode=1))
        code = await command

    assert code == 1
    assert "prefill-2 can't start: no memory" in capsys.readouterr().err


async def silence(field: Field) -> None:
    """As when `pdq up` is late with its row. The beats under way are ahead of us on the same connection."""
    field.state = None
    await field.scale.leave(ROW)


async def test_a_row_that_is_missing_for_a_while_is_waited_for_and_asked_again(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, state=STATE) as field:
        command = asyncio.create_task(field.run("scale", "prefill=2"))
        wish = await asked(field)
        await silence(field)
        await printed_until(capsys, f"no word of {ROW}")
        field.wish = Wish(prefill=1, decode=1)  # as if it had not read what was asked
        field.state = STATE
        asked_again = await asked(field)
        field.state = dataclasses.replace(STATE, wish=str(asked_again), prefill=2)
        code = await command

    assert (asked_again, code) == (wish, 0)


async def test_a_row_that_comes_back_with_what_another_asked_just_before_is_asked_again(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, others = RedisScale.ask, Wish(prefill=1, decode=4)

    async def ask_a_moment_later(table: RedisScale, row: ScaleRow, wish: Wish) -> Wish | None:
        monkeypatch.setattr(RedisScale, "ask", ask)
        await ask(table, row, others)
        return await ask(table, row, wish)

    monkeypatch.setattr(RedisScale, "ask", ask_a_moment_later)
    async with field_of(private_redis, state=STATE) as field:
        command = asyncio.create_task(field.run("scale", "prefill=2"))
        said = await printed_until(capsys, "asked for")
        await silence(field)
        await printed_until(capsys, f"no word of {ROW}")
        field.wish = others
        field.state = STATE
        async with asyncio.timeout(LIMIT_S):
            while field.wish == others and not command.done():  # noqa: ASYNC110 - asked by another thread
                await asyncio.sleep(0.01)
        field.state = dataclasses.replace(STATE, wish=str(field.wish), prefill=2, decode=4)
        code = await command

    assert "asked for prefill=2 decode=4 (was prefill=1 decode=4)" in said
    assert (field.wish, code) == (Wish(prefill=2, decode=4), 0)


async def test_a_pdq_up_that_stays_silent_is_gone(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, state=STATE) as field:
        command = asyncio.create_task(field.run("scale", "prefill=2"))
        await asked(field)
        await silence(field)
        code = await command

    assert code == 1
    assert f"{ROW} is gone" in capsys.readouterr().err


async def test_the_wait_has_a_limit(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with field_of(private_redis, state=STATE) as field:
        code = await field.run("scale", "prefill=2", "--wait-limit-s", "0.3")

    assert code == 1
    assert "not reached within 0.3 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prefill=x"], "'prefill=x': give prefill=NUMBER"),
        (["gateway=2"], "'gateway=2': give prefill=NUMBER"),
        (["prefill=1000"], "from 0 to 256 processes"),
        (["prefill=2", "--host", "other"], f"no such `pdq up`; give --host with the start of one of {ROW}"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    async with field_of(private_redis, state=STATE) as field:
        code = await field.run("scale", *words)

        assert field.wish == Wish(prefill=1, decode=1)
    assert code == 2
    assert said in capsys.readouterr().err


async def test_where_no_pdq_up_runs_it_says_what_to_do(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis) as field:
        shown, asked_for = await field.run("scale"), await field.run("scale", "prefill=2")

    assert (shown, asked_for) == (0, 2)
    printed = capsys.readouterr()
    assert "ended with `pdq drain WORKER_ID`" in printed.out
    assert "start workers by hand" in printed.err


async def test_without_numbers_it_shows_what_runs(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, state=STATE) as field:
        code = await field.run("scale")

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{ROW}: prefill=1 decode=1; prefill 1 of 1 ready, decode 1 of 1 ready"
    ]


async def test_drain_by_the_start_of_an_id_waits_until_the_worker_is_gone(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, state=STATE, records=[worker(P), worker(D)]) as field:
        code = await field.run("drain", "pre")

        assert field.drained == [P]
        assert await asked(field) == Wish(prefill=0, decode=1)  # the beat in which it left may be under way
    printed = capsys.readouterr().out
    assert code == 0
    assert f"{P}: asked to drain; its `pdq up` wants one prefill worker less now" in printed
    assert printed.splitlines()[-1].endswith("gone")


async def test_a_worker_that_was_started_by_hand_is_drained_too(private_redis: RedisServer) -> None:
    far = worker("decode-far-9-ee")
    async with field_of(private_redis, state=STATE, records=[worker(D), far]) as field:
        assert await field.run("drain", far.worker_id) == 0
        assert field.drained == [far.worker_id]
        assert field.wish == Wish(prefill=1, decode=1)


async def test_a_gateway_may_be_drained_and_changes_no_wish(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    state = dataclasses.replace(STATE, pids="41,42,43")
    async with field_of(private_redis, state=state, records=[worker(G)]) as field:
        assert await field.run("drain", "gateway") == 0
        assert field.wish == Wish(prefill=1, decode=1)
    assert "starts a gateway again" in capsys.readouterr().out


async def test_a_worker_that_takes_its_time_is_reported(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis, beats=False, records=[worker(P, running=2, parked=1)]) as field:
        code = await field.run("drain", P, "--wait-limit-s", "0.3")

    assert code == 1
    printed = capsys.readouterr()
    assert "ready: running 2, waiting 0, parked 1" in printed.out
    assert f"{P} is still there after 0.3 s" in printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], f"give a WORKER_ID; there are: {D}, {P}"),
        (["nobody"], f"no worker begins with 'nobody'; there are: {D}, {P}"),
    ],
)
async def test_drain_says_which_workers_there_are(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    async with field_of(private_redis, records=[worker(P), worker(D)]) as field:
        code = await field.run("drain", *words)

        assert field.drained == []
    assert code == 2
    assert said in capsys.readouterr().err


async def test_an_ambiguous_start_drains_nobody(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    other = worker("prefill-box-44-dd")
    async with field_of(private_redis, records=[worker(P), other]) as field:
        code = await field.run("drain", "prefill")

        assert field.drained == []
    assert code == 2
    assert "2 workers begin with 'prefill'" in capsys.readouterr().err
