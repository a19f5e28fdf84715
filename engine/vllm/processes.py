"""The life of vLLM around a worker: started in a thread, since that takes a minute, and ended without remains."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil
import structlog

from engine.base import EngineError
from engine.vllm.launch import Plan, Started, launch
from engine.vllm.shared_files import SharedFiles
from engine.vllm.side_channel_ports import SidePorts

Launch = Callable[[Plan, Callable[[str], None], Callable[[], None]], Started]
_ABANDON_S: Final = 60.0
"""Longest wait for the starting thread, which nothing can stop while it imports."""
_KILL_S: Final = 10.0
"""A killed process may take this long to give its memory back."""
_NAME: Final = "EngineCore"
"""What vLLM's direct children are called."""
_log = structlog.get_logger(__name__)


class StartFault(RuntimeError):
    """One of vLLM's processes failed of a bug, not of what it was told."""


class VllmProcesses:
    """vLLM's processes of one engine. `start` once; `stop` at any time, also twice."""

    def __init__(
        self, plan: Plan, files: SharedFiles, ports: SidePorts, *, start_s: float, stop_s: float, start: Launch = launch
    ) -> None:
        """`start` creates `files`, `stop` removes them and gives `ports` back."""
        self._plan = plan
        self._start_s = start_s
        self._stop_s = stop_s
        self._start = start
        self._files = files
        self._ports = ports
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm")
        self._launching: asyncio.Future[Started] | None = None
        self._is_unwanted = False
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> Started:
        """Raises EngineError with vLLM's own reason, StartFault and others for bugs. Cancelled: the processes end all
        the same."""
        assert self._launching is None, "an engine is started once"
        self._check()
        self._files.create()
        loop = asyncio.get_running_loop()
        self._launching = loop.run_in_executor(self._thread, self._start, self._plan, self._report, self._check)
        try:
            async with asyncio.timeout(self._start_s):
                return await asyncio.shield(self._launching)
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"vLLM was not ready after {self._start_s:g} s (vllm_start_s)") from error
        except Exception as error:
            failure = self._files.first_failure
            await self.stop()
            if failure is None:
                raise
            kind = EngineError if failure.is_refusal else StartFault
            raise kind(f"vLLM didn't start: {failure.text}") from error
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def stop(self) -> None:
        """Ends all processes of vLLM; those that take longer than `stop_s` are killed. All callers wait for one end,
        which a cancelled caller doesn't interrupt. Raises what vLLM's own shutdown raised."""
        self._is_unwanted = True
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="vllm-stop")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            if self._launching is not None:
                await self._end_launched(self._launching)
        finally:
            self._ports.close()
            self._thread.shutdown(wait=False)
            self._files.remove()

    async def _end_launched(self, launching: asyncio.Future[Started]) -> None:
        started = await self._settled(launching)
        processes = _tree()
        try:
            if started is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, _shut_down, started.llm, self._stop_s)
        finally:
            await asyncio.to_thread(_end, processes)

    async def _settled(self, launching: asyncio.Future[Started]) -> Started | None:
        """Ends a start that is still under way: without its processes it fails by itself."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _ABANDON_S
        while not launching.done() and loop.time() < give_up:
            await asyncio.to_thread(_end, _tree())
            await asyncio.wait([launching], timeout=0.2)
        if not launching.done():
            _log.warning("vllm_start_abandoned")
            return None
        return None if launching.cancelled() or launching.exception() else launching.result()

    def _report(self, doing: str) -> None:
        _log.info("engine_starting", doing=doing)

    def _check(self) -> None:
        if self._is_unwanted:
            raise EngineError("stopped while it started")


def _tree() -> list[psutil.Process]:
    """The engine core and all below it."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if child.pid is not None and child.name.startswith(_NAME):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(child.pid)
                found += [process, *process.children(recursive=True)]
    return found


def _shut_down(llm: Any, timeout_s: float) -> None:
    llm.shutdown(timeout=timeout_s)
    llm.shutdown = _nothing  # its finalizer calls this again, and fails at the interpreter's end


def _nothing() -> None:
    pass


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_S)
