"""`pdq dead list|show|drop`."""

from __future__ import annotations

import pytest

from broker.redis_dead import DeadLetters
from tests.cli.operators import MODEL, SECRET, field_of
from tests.servers import RedisServer


async def test_list_shows_the_newest_first(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with field_of(private_redis) as field:
        await field.bury("r1", failure="engine crashed")
        await field.bury("r2", failure="lease of p9 ran out")
        code = await field.run("dead", "list")

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [row[0] for row in rows if row and row[0] in ("r1", "r2")] == ["r2", "r1"]
    r1 = next(row for row in rows if row and row[0] == "r1")
    assert r1[1:-2] == ["max_attempts", "engine", "crashed", "1.1", "125"]


async def test_a_listed_id_can_be_copied_from_a_narrow_terminal(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "743698c366434a6fb8f386f308272722"
    async with field_of(private_redis) as field:
        await field.bury(name, failure="the engine is gone, and a lot more that somebody wants to say about it")
        await field.run("dead")

    assert name in capsys.readouterr().out


async def test_show_prints_every_field_and_of_the_payload_only_numbers(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with field_of(private_redis) as field:
        await field.bury("r1", failure="engine crashed")
        code = await field.run("dead", "show", "r1")

    printed = capsys.readouterr().out
    shown = dict(line.split(maxsplit=1) for line in printed.splitlines() if len(line.split(maxsplit=1)) == 2)
    assert code == 0
    assert {name: shown[name] for name in ("id", "gen", "reason", "attempts", "worker", "error", "tokens")} == {
        "id": "r1",
        "gen": "1",
        "reason": "max_attempts",
        "attempts": "1",
        "worker": "p9",
        "error": "engine crashed",
        "tokens": "125",
    }
    assert shown["payload"] == "123 prompt tokens, 2 generated, max_tokens 30, mode push"
    assert str(SECRET) not in printed


async def test_drop_takes_one_or_all(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    async with field_of(private_redis) as field:
        letters = DeadLetters(field.calls, MODEL)
        for name in ("r1", "r2", "r3"):
            await field.bury(name)

        one = await field.run("dead", "drop", "r2")
        left = [letter.request_id for letter in await letters.newest(10)]
        rest = await field.run("dead", "drop", "all")
        none = await field.run("dead", "list")

        assert await letters.newest(10) == ()
    assert (one, rest, none) == (0, 0, 0)
    assert left == ["r3", "r1"]
    assert capsys.readouterr().out.splitlines() == ["dropped 1", "dropped 2", "no dead letters"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "r9"], "no dead letter 'r9'"),
        (["drop"], "give: list, show ID, drop ID or drop all"),
        (["bury", "r1"], "give: list, show ID, drop ID or drop all"),
        (["show", "all"], "no dead letter 'all'"),
    ],
)
async def test_what_is_not_there_is_said(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    async with field_of(private_redis) as field:
        await field.bury("r1")
        code = await field.run("dead", *words)

    assert code == 2
    assert said in capsys.readouterr().err
