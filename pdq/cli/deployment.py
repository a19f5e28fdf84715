"""Everything on one machine: the embedded server, gateways, prefill and decode workers, started and stopped in order.

Start: server (until it answers PING), then all roles at once; they find each other through it. Stop: gateways finish
their requests while workers still work, then workers, then the server. A role that dies is started again.
Between start and stop the numbers of workers follow `pdq scale` (scale_control.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from broker.redis_scale import Wish
from pdq.cli.children import BackOff, Child
from pdq.cli.deployment_settings import DeploymentSettings
from pdq.cli.fleet import Fleet
from pdq.cli.gateway_client import is_ready
from pdq.cli.redis_server import server_command, wait_until_serving
from pdq.cli.role_commands import RoleCommands
from pdq.cli.run_folder import RunFolder, row_name
from pdq.cli.scale_control import ScaleControl
from pdq.runtime.ports import FixedPort, check_ports, free_port

__all__ = ["Deployment", "DeploymentSettings"]

_REDIS_START_S: Final = 60.0
_STOP_ORDER: Final = (("gateway",), ("prefill", "decode"), ("redis",))


class Deployment:
    """Use as an async context manager: entering starts the processes (StartupError), leaving stops them in order."""

    def __init__(
        self,
        settings: DeploymentSettings,
        *,
        environ: Mapping[str, str],
        role_flags: tuple[str, ...] = (),
        on_change: Callable[[Child], None] = lambda _: None,
    ) -> None:
        """`environ` and `role_flags` are for every role; `on_change` hears of each start and end."""
        self.settings = settings
        self.redis_url = settings.redis or ""
        self.folder = RunFolder(settings.run_dir)
        self._role_flags = role_flags
        self._on_change = on_change
        self._control: ScaleControl | None = None
        self._controlling: asyncio.Task[None] | None = None
        self._fleet = Fleet(
            self.folder,
            environ=environ,
            back_off=BackOff(min_s=settings.restart_min_s, max_s=settings.restart_max_s),
            on_change=self._changed,
            may_restart=self._may_restart,
            on_cannot_start=self._on_cannot_start,
        )

    @property
    def children(self) -> list[Child]:
        """In order of start; those that scaling let go are no longer here."""
        return self._fleet.children

    @property
    def _http_ports(self) -> range:
        return range(self.settings.http_port, self.settings.http_port + self.settings.gateways)

    async def __aenter__(self) -> Deployment:
        settings = self.settings
        check_ports(FixedPort(host=settings.http_host, port=port, setting="--http-port") for port in self._http_ports)
        self.folder.__enter__()
        try:
            if not self.redis_url:
                await self._start_redis()
            self._start_roles()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def wait_until_ready(self) -> None:
        """Until every gateway answers GET /ready with 200; no time limit. Raises StartupError as `wait_failed`."""
        urls = [self.settings.url.rpartition(":")[0] + f":{port}" for port in self._http_ports]
        failed = asyncio.create_task(self.wait_failed())
        try:
            for url in urls:
                while not await asyncio.to_thread(is_ready, url):
                    await asyncio.wait([failed], timeout=0.2)
                    if failed.done():
                        await failed
        finally:
            failed.cancel()

    async def wait_failed(self) -> None:
        """Never returns while all is well. Raises StartupError when a process can't start at all."""
        await self._fleet.wait_failed()

    def kill(self) -> None:
        """Ends everything at once, without order."""
        self._fleet.kill()

    async def _start_redis(self) -> None:
        if self.settings.fresh:
            shutil.rmtree(self.folder.redis_dir, ignore_errors=True)
        port = free_port(besides=self._http_ports)  # not in use yet
        self._fleet.start("redis", server_command(self.folder.redis_dir, port), is_vital=True)
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        serving = asyncio.create_task(wait_until_serving(port, _REDIS_START_S))
        failed = asyncio.create_task(self.wait_failed())
        try:
            done, _ = await asyncio.wait([serving, failed], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            serving.cancel()
            failed.cancel()

    def _start_roles(self) -> None:
        settings, fleet = self.settings, self._fleet
        commands = RoleCommands(settings, redis_url=self.redis_url, role_flags=self._role_flags)
        for number in range(1, settings.gateways + 1):
            fleet.start(f"gateway-{number}", commands.gateway(number), is_vital=True)
        for role, count in (("prefill", settings.prefill), ("decode", settings.decode)):
            for number in range(1, count + 1):
                fleet.start(f"{role}-{number}", commands.worker(role), is_vital=True)
        self._control = ScaleControl(
            fleet,
            redis_url=self.redis_url,
            model=settings.served_model.name,
            name=row_name(self.folder.path),
            own=Wish(prefill=settings.prefill, decode=settings.decode),
            grace_s=settings.stop_grace_s,
            start=lambda role, number: fleet.start(f"{role}-{number}", commands.worker(role), is_vital=False),
        )
        self._controlling = asyncio.create_task(self._control.run(), name="scale-control")

    def _changed(self, child: Child) -> None:
        self.folder.write_up(
            {
                "http": self.settings.url,
                "redis": self.redis_url,
                "model": self.settings.served_model.name,
                "processes": {c.name: {"pid": c.pid, "state": c.state, "log": str(c.log_path)} for c in self.children},
            }
        )
        if self._control is not None:
            self._control.changed()
        if child in self.children:  # else: it has been let go, and its end was told before
            self._on_change(child)

    async def _may_restart(self, child: Child) -> bool:
        return self._control is None or await self._control.may_restart(child)

    def _on_cannot_start(self, child: Child) -> None:
        if self._control is not None:
            self._control.on_cannot_start(child)

    async def _stop(self) -> None:
        try:
            if self._controlling is not None:
                self._controlling.cancel()
                await asyncio.gather(self._controlling, return_exceptions=True)
            control, self._control = self._control, None
            if control is not None:
                await control.close()
        finally:
            with contextlib.ExitStack() as cleanup:
                cleanup.callback(self.folder.__exit__)
                await self._fleet.stop(_STOP_ORDER, self.settings.stop_grace_s)
