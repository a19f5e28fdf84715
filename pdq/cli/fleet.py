"""The processes of a deployment: started, kept running, let go, stopped; and whether one of them can't run at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from pdq.cli.children import BackOff, Child, stop_all
from pdq.cli.run_folder import RunFolder
from pdq.runtime.errors import StartupError


class Fleet:
    """Names are `<role>-<number>`; `children` is in order of start."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        environ: Mapping[str, str],
        back_off: BackOff,
        on_change: Callable[[Child], None],
        may_restart: Callable[[Child], Awaitable[bool]],
        on_cannot_start: Callable[[Child], None],
    ) -> None:
        """`on_cannot_start` hears of processes that were started later; the first ones are vital: see `wait_failed`."""
        self.children: list[Child] = []
        self._folder = folder
        self._environ = environ
        self._back_off = back_off
        self._on_change = on_change
        self._may_restart = may_restart
        self._on_cannot_start = on_cannot_start
        self._keeping: dict[asyncio.Task[None], Child] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._vital: set[Child] = set()
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()

    def start(self, name: str, command: list[str], *, is_vital: bool) -> None:
        child = Child(
            name,
            command,
            log_path=self._folder.log_path(name),
            environ=self._environ,
            back_off=self._back_off,
            on_change=self._on_change,
            may_restart=self._may_restart,
        )
        child.log_path.unlink(missing_ok=True)
        self.children.append(child)
        if is_vital:
            self._vital.add(child)
        task = asyncio.create_task(child.keep_running(), name=name)
        self._keeping[task] = child
        task.add_done_callback(self._ended)

    def of_role(self, role: str) -> list[Child]:
        return [child for child in self.children if child.name.rpartition("-")[0] == role]

    def let_go(self, child: Child, grace_s: float) -> None:
        """The caller asks it to drain; after `grace_s` it is killed. Gone from `children` when it has ended."""
        child.leave()
        task = asyncio.create_task(child.stop(grace_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def wait_failed(self) -> None:
        """Never returns while all is well. Raises StartupError when a vital process can't run at all."""
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    async def stop(self, kinds: tuple[tuple[str, ...], ...], grace_s: float) -> None:
        """In the order of `kinds` (starts of names), then whatever is left at once."""
        try:
            for kind in kinds:
                await stop_all([child for child in self.children if child.name.startswith(kind)], grace_s)
        finally:
            self.kill()
            tasks = [*self._keeping, *self._leaving]
            for task in tasks:
                task.remove_done_callback(self._ended)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """Ends everything at once, without order."""
        for child in self.children:
            child.kill()

    def _ended(self, task: asyncio.Task[None]) -> None:
        child = self._keeping.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None and child.is_leaving:
            self._forget(child)
        elif isinstance(error, StartupError) and child not in self._vital:
            self._forget(child)
            self._on_cannot_start(child)
        elif self._failure is None:
            self._failure = error or StartupError(f"{child.name} has stopped")
            self._has_failed.set()

    def _forget(self, child: Child) -> None:
        self.children.remove(child)
        self._vital.discard(child)
        self._on_change(child)
