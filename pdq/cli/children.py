"""Keeps child processes running: restart with back-off, and an end that leaves nothing behind.

Each child leads a session and process group of its own, so Ctrl-C reaches only us and we decide the order of the end;
a child's own children are ended through the group. Should we be killed, the kernel ends the children
(runtime/child.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdq.runtime.child import command_of_child
from pdq.runtime.errors import StartupError

_BAD_SETTINGS: Final = 2
"""Exit code of a role that can't start; starting it again would not help."""
_HEALTHY_S: Final = 30.0
"""A child that ran for this long starts again without delay growth."""
_TAIL_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Delay before restart n (from 0): doubling from `min_s` to `max_s`."""

    min_s: float
    max_s: float

    def delay_s(self, failures: int) -> float:
        return min(self.max_s, self.min_s * 2.0 ** min(failures, 30))


async def _always(_: Child) -> bool:
    return True


class Child:
    """One process that is kept running until `stop` or `leave`. For people to see: `state`, `pid`, `restarts`."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        log_path: Path,
        environ: Mapping[str, str],
        back_off: BackOff,
        on_change: Callable[[Child], None],
        may_restart: Callable[[Child], Awaitable[bool]] = _always,
    ) -> None:
        """`may_restart` is asked after each end that nobody here wanted; it may call `leave`."""
        self.name = name
        self.log_path = log_path
        self.pid: int | None = None
        self.restarts = 0
        self.state = "not started"
        self.is_leaving = False
        """Asked to finish what it has and to end by itself."""
        self._command = command
        self._environ = dict(environ)
        self._back_off = back_off
        self._on_change = on_change
        self._may_restart = may_restart
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def keep_running(self) -> None:
        """Returns after `stop` or `leave`. Raises StartupError when the first start ends with the exit code of bad
        settings."""
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            code = await self._run_once()
            if self._stopping.is_set() or self.is_leaving:
                self._change(_how_left(code, self.is_leaving))
                return
            if code == _BAD_SETTINGS and self.restarts == 0:
                self._change("can't start")
                raise StartupError(f"{self.name} can't start:\n{self.log_tail()}")
            if not await self._may_restart(self):
                self._change(_how_left(code, self.is_leaving))
                return
            failures = 0 if loop.time() - started >= _HEALTHY_S else failures
            delay_s = self._back_off.delay_s(failures)
            failures += 1
            self.restarts += 1
            self._change(f"{_how_ended(code)}; starts again in {delay_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
        self._change("stopped")

    def leave(self) -> None:
        """Whoever calls this asks the process to drain; it isn't started again."""
        self.is_leaving = True
        if self.pid is None:  # between two starts
            self._stopping.set()
        self._change("draining")

    def terminate(self) -> None:
        """SIGTERM: it finishes what it has."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to the whole group after `grace_s`. Returns when the process is gone.

        One that is leaving gets no SIGTERM: it drains already, and a second request would end it at once.
        """
        self._stopping.set()
        process = self._process
        if process is None:
            return
        if not self.is_leaving:
            self._change("stopping")
            self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self._change(f"killed after {grace_s:g} s")
        finally:
            self.kill()
        await process.wait()

    def kill(self) -> None:
        """SIGKILL to the process and all that it started, now."""
        self._stopping.set()
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines of its log, for a message to a person."""
        try:
            lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:]) or "  (it wrote nothing)"

    async def _run_once(self) -> int:
        with self.log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command_of_child(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )
        self._process, self.pid = process, process.pid
        try:
            if self._stopping.is_set():  # asked to stop while it was being started
                self.kill()
            self._change("running")
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):  # whatever it started and left behind, also when we are cancelled
                os.killpg(process.pid, signal.SIGKILL)
            self._process, self.pid = None, None

    def _change(self, state: str) -> None:
        self.state = state
        self._on_change(self)


async def stop_all(children: Iterable[Child], grace_s: float) -> None:
    """All at once; returns when every one is gone."""
    await asyncio.gather(*(child.stop(grace_s) for child in children))


def _how_left(code: int, is_leaving: bool) -> str:
    if not is_leaving:
        return "stopped"
    return "drained" if code == 0 else _how_ended(code)


def _how_ended(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
