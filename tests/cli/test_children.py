from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from pdq.cli.children import BackOff, Child
from pdq.runtime.errors import StartupError
from tests.cli.conftest import LIMIT_S

QUICK = BackOff(min_s=0.01, max_s=0.04)


class Watch:
    """Collects a child's states, and waits for one."""

    def __init__(self) -> None:
        self.states: list[str] = []
        self.pids: list[int] = []
        self._changed = asyncio.Event()

    def __call__(self, child: Child) -> None:
        self.states.append(child.state)
        if child.state == "running" and child.pid is not None:
            self.pids.append(child.pid)
        self._changed.set()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_reached():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def kept_running(tmp_path: Path, watch: Watch, *command: str) -> AsyncIterator[Child]:
    child = Child(
        "worker", list(command), log_path=tmp_path / "log", environ=os.environ, back_off=QUICK, on_change=watch
    )
    task = asyncio.create_task(child.keep_running())
    try:
        yield child
        await child.stop(LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await task
    finally:
        child.kill()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_delay_doubles_up_to_its_limit() -> None:
    back_off = BackOff(min_s=0.5, max_s=30.0)

    assert [back_off.delay_s(n) for n in (0, 1, 2, 5, 6, 10**6)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


async def test_a_dying_child_starts_again_with_growing_delay(tmp_path: Path) -> None:
    watch = Watch()
    async with kept_running(tmp_path, watch, sys.executable, "-c", "print('hello'); raise SystemExit(1)") as child:
        await watch.until(lambda: child.restarts >= 3)

    assert len(set(watch.pids)) >= 3
    assert [s for s in watch.states if "starts again" in s][:3] == [
        "ended with exit code 1; starts again in 0.01 s",
        "ended with exit code 1; starts again in 0.02 s",
        "ended with exit code 1; starts again in 0.04 s",
    ]
    assert watch.states[-1] == "stopped"
    assert "hello" in child.log_tail()


async def test_a_killed_child_starts_again(tmp_path: Path) -> None:
    watch = Watch()
    async with kept_running(tmp_path, watch, "sleep", "1000"):
        await watch.until(lambda: len(watch.pids) == 1)
        os.kill(watch.pids[0], signal.SIGKILL)

        await watch.until(lambda: len(watch.pids) == 2)

    assert any("killed by SIGKILL" in state for state in watch.states)


async def test_exit_code_2_at_the_first_start_is_final_and_shows_the_log(tmp_path: Path) -> None:
    code = "print('--model is missing'); raise SystemExit(2)"
    child = Child(
        "gateway-1",
        [sys.executable, "-c", code],
        log_path=tmp_path / "log",
        environ=os.environ,
        back_off=QUICK,
        on_change=Watch(),
    )

    with pytest.raises(StartupError, match=r"gateway-1 can't start:\n  --model is missing"):
        await child.keep_running()


async def test_a_child_that_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    )
    watch = Watch()
    log = tmp_path / "log"
    async with kept_running(tmp_path, watch, sys.executable, "-u", "-c", code) as child:
        await watch.until(lambda: bool(watch.pids))
        async with asyncio.timeout(LIMIT_S):
            while not log.read_text().endswith("\n"):  # noqa: ASYNC110 - a file tells nothing by itself
                await asyncio.sleep(0.01)
        grandchild = psutil.Process(int(log.read_text()))

        await child.stop(0.05)

    _, alive = psutil.wait_procs([grandchild], timeout=LIMIT_S)
    assert alive == []
    assert "killed after 0.05 s" in watch.states


async def test_stopping_before_the_first_start_starts_nothing(tmp_path: Path) -> None:
    watch = Watch()
    async with kept_running(tmp_path, watch, "sleep", "1000") as child:
        await child.stop(LIMIT_S)

    assert watch.pids == []
