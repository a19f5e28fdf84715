"""`pdq top`: one frame, the live view in a terminal, and the rates in it."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import pty
import sys
import termios
from collections.abc import Coroutine
from typing import Any

import pytest

from broker.redis_scale import UpState
from pdq.cli.rates import Rates
from pdq.cli.tables import kv_bar
from tests.cli.conftest import LIMIT_S
from tests.cli.operators import ROW, Field, field_of, lasting_heartbeat, worker
from tests.servers import RedisServer

P = worker("prefill-box-41-aa", total_blocks=100, free_blocks=25, running=2, waiting=1, parked=3)
G = worker("gateway-box-43-cc", running=5, waiting=2)
STATE = UpState(host="box", pids="41", problem="prefill-2 can't start: no memory")
TOP = [sys.executable, "-c", "import sys; from pdq.cli.main import main; sys.exit(main())", "top"]


async def while_it_does(tokens_per_s: int, field: Field, command: Coroutine[Any, Any, int]) -> tuple[int, float]:
    """Runs the command while P's token count rises steadily. Its code, and how old a count was that somebody read."""
    loop = asyncio.get_running_loop()
    began = told_at = loop.time()
    oldest_s = 0.0
    await lasting_heartbeat(field.calls, field.registry, P)
    running = asyncio.create_task(command)
    while not (await asyncio.wait([running], timeout=0.05))[0]:
        now = loop.time()
        record = dataclasses.replace(P, done_tokens=int((now - began) * tokens_per_s))
        await lasting_heartbeat(field.calls, field.registry, record)
        oldest_s, told_at = max(oldest_s, loop.time() - told_at), now
    return running.result(), max(oldest_s, loop.time() - told_at)


async def test_one_frame_shows_queue_workers_pools_rates_and_the_wish(
    private_redis: RedisServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    async with field_of(private_redis, records=[G], state=STATE) as field:
        await field.enqueue("r1")
        for _ in range(10):
            command = field.run("top", "--once", "--refresh-s", "0.5")
            code, oldest_s = await while_it_does(10_000, field, command)
            printed = capsys.readouterr().out
            if oldest_s < 0.2:
                break  # else the counts were not told steadily enough for a rate

    rows = [line.split() for line in printed.splitlines()]
    assert code == 0
    assert "queue: 1 queued, 0 in prefill, 0 dead letters" in printed
    assert "tokens: 125 queued, 0 in prefill   requests in flight: 7" in printed
    assert f"scale: {ROW} prefill=1 decode=1  prefill-2 can't start: no memory" in printed
    (prefill,) = (row for row in rows if row[:1] == [P.worker_id])
    assert prefill[1:-1] == ["ready", "2/1/3", "████████··", "75%"]
    assert 5_000 < float(prefill[-1].replace(",", "")) < 20_000  # told each 50 ms of a window of half a second
    assert [G.worker_id, "ready", "5/2/0", "-", "-"] in rows


@pytest.mark.parametrize("pressed", [b"q", b"\x03"])
async def test_in_a_terminal_it_stays_until_q_or_ctrl_c(private_redis: RedisServer, pressed: bytes) -> None:
    async with field_of(private_redis, records=[P]) as field:
        ours, theirs = pty.openpty()
        shown = bytearray()
        drawn, seen = asyncio.Event(), asyncio.Event()

        def on_output() -> None:
            shown.extend(os.read(ours, 65536))
            drawn.set()
            if shown.count(P.worker_id.encode()) >= 2:
                seen.set()

        loop = asyncio.get_running_loop()
        loop.add_reader(ours, on_output)
        try:
            process = await asyncio.create_subprocess_exec(
                *TOP, "--redis", field.url, "--refresh-s", "0.1",
                stdin=theirs, stdout=theirs, stderr=theirs,
                start_new_session=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
                preexec_fn=lambda: _own_terminal(theirs),
            )  # fmt: skip
            async with asyncio.timeout(LIMIT_S):
                await seen.wait()
                os.write(ours, pressed)
                code = await process.wait()
        finally:
            loop.remove_reader(ours)
            os.close(theirs)
            os.close(ours)

    assert code == 0, shown.decode(errors="replace")
    assert b"Traceback" not in shown


def _own_terminal(terminal: int) -> None:
    """So that Ctrl-C in it becomes a signal."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_rates_are_over_the_last_seconds() -> None:
    rates = Rates()
    found = [
        rates.observe([dataclasses.replace(P, done_tokens=tokens)], now_s=now_s)
        for now_s, tokens in ((0.0, 0), (1.0, 100), (2.0, 200), (20.0, 200), (21.0, 210))
    ]

    assert found == [{}, {P.worker_id: 100}, {P.worker_id: 100}, {}, {P.worker_id: 10}]


def test_workers_that_are_gone_are_forgotten() -> None:
    rates = Rates()
    rates.observe([P], now_s=0.0)
    rates.observe([], now_s=1.0)

    assert rates.observe([P], now_s=2.0) == {}


@pytest.mark.parametrize(("free", "bar"), [(100, "··········   0%"), (0, "██████████ 100%"), (45, "██████████"[:6])])
def test_the_bar_says_how_full_a_pool_is(free: int, bar: str) -> None:
    assert kv_bar(free, 100).startswith(bar)
