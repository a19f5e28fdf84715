"""Everything on one machine: the embedded server, gateways, prefill and decode workers, started and stopped in order.

Start: server (until it answers PING), then all roles at once; they find each other through it. Stop: gateways finish
their requests while workers still work, then workers, then the server. A role that dies is started again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from pdq.cli.children import BackOff, Child, stop_all
from pdq.cli.gateway_client import is_ready
from pdq.cli.redis_server import free_port, server_command, wait_until_serving
from pdq.cli.run_folder import RunFolder
from pdq.runtime.errors import StartupError
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import FixedPort, check_ports

_DEFAULT_TORCH_MODEL: Final = "smollm2-135m"
_REDIS_START_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSettings:
    """What runs, and where."""

    gateways: int = field(default=1, metadata={"help": "gateway processes; the n-th listens on http-port + n - 1"})
    prefill: int = field(default=1, metadata={"help": "prefill worker processes"})
    decode: int = field(default=1, metadata={"help": "decode worker processes"})
    engine: Literal["torch", "sim"] = field(
        default="torch", metadata={"help": "torch: a real model on the CPU; sim: no model, simulated times"}
    )
    engine_threads: int | None = field(
        default=None, metadata={"help": "torch threads per worker; none: the cores shared out, at least 1"}
    )
    model: ModelSettings = field(default_factory=ModelSettings)
    """`--engine torch` without `--model` takes smollm2-135m."""
    redis: str | None = field(default=None, metadata={"help": "URL of a running Redis; none: starts an embedded one"})
    http_host: str = field(default="127.0.0.1", metadata={"help": "address that the gateways listen on"})
    http_port: int = field(default=8000, metadata={"help": "port of the first gateway"})
    run_dir: Path = field(default=Path(".pdq"), metadata={"help": "folder for addresses, logs and the embedded Redis"})
    fresh: bool = field(default=False, metadata={"help": "empty the embedded Redis first"})
    stop_grace_s: float = field(default=40.0, metadata={"help": "at the end: time per process before it is killed"})
    restart_min_s: float = field(default=0.5, metadata={"help": "delay before a dead process starts again; doubles"})
    restart_max_s: float = field(default=30.0, metadata={"help": "longest such delay"})

    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata={"help": "least important log lines of the processes"}
    )

    def __post_init__(self) -> None:
        if min(self.gateways, self.prefill, self.decode) < 0:
            raise ValueError("--gateways, --prefill and --decode are numbers of processes: 0 or more")
        if self.gateways + self.prefill + self.decode == 0:
            raise ValueError("nothing to run: --gateways, --prefill and --decode are all 0")

    @property
    def served_model(self) -> ModelSettings:
        """The model, with the engine's default where none was given."""
        if self.engine == "torch" and self.model.is_sim:
            return dataclasses.replace(self.model, model=_DEFAULT_TORCH_MODEL)
        return self.model

    @property
    def worker_threads(self) -> int:
        """More threads than cores spin against each other: a demo on 2 busy cores took 4 times as long."""
        return self.engine_threads or max(1, (os.cpu_count() or 1) // max(1, self.prefill + self.decode))

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.http_host in ("0.0.0.0", "::", "*") else self.http_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}"


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
        self.children: list[Child] = []
        self.folder = RunFolder(settings.run_dir)
        self._environ = environ
        self._role_flags = role_flags
        self._on_change = on_change
        self._tasks: dict[asyncio.Task[None], Child] = {}

    async def __aenter__(self) -> Deployment:
        settings = self.settings
        check_ports(
            FixedPort(host=settings.http_host, port=settings.http_port + n, setting="--http-port")
            for n in range(settings.gateways)
        )
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
        urls = [
            self.settings.url.rpartition(":")[0] + f":{self.settings.http_port + n}"
            for n in range(self.settings.gateways)
        ]
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
        while True:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                raise StartupError(f"{self._tasks[task].name} has stopped")

    def kill(self) -> None:
        """Ends everything at once, without order."""
        for child in self.children:
            child.kill()

    async def _start_redis(self) -> None:
        if self.settings.fresh:
            shutil.rmtree(self.folder.redis_dir, ignore_errors=True)
        port = free_port()
        self._start("redis", server_command(self.folder.redis_dir, port))
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
        settings = self.settings
        model = settings.served_model
        common = ["--redis", self.redis_url, "--model", model.model, "--served-model-name", model.served_model_name]
        common += ["--mode", model.mode]
        common += ["--model-cache", str(model.model_cache), "--log-level", settings.log_level, *self._role_flags]
        for n in range(settings.gateways):
            http = ["--http-host", settings.http_host, "--http-port", str(settings.http_port + n)]
            self._start(f"gateway-{n + 1}", [sys.executable, "-m", "gateway", *common, *http])
        engine = ["--engine", settings.engine, "--engine-threads", str(settings.worker_threads)]
        for role, count in (("prefill", settings.prefill), ("decode", settings.decode)):
            for n in range(count):
                self._start(f"{role}-{n + 1}", [sys.executable, "-m", f"{role}_worker", *common, *engine])

    def _start(self, name: str, command: list[str]) -> None:
        child = Child(
            name,
            command,
            log_path=self.folder.log_path(name),
            environ=self._environ,
            back_off=BackOff(min_s=self.settings.restart_min_s, max_s=self.settings.restart_max_s),
            on_change=self._changed,
        )
        child.log_path.unlink(missing_ok=True)
        self.children.append(child)
        self._tasks[asyncio.create_task(child.keep_running(), name=name)] = child

    def _changed(self, child: Child) -> None:
        self.folder.write_up(
            {
                "http": self.settings.url,
                "redis": self.redis_url,
                "model": self.settings.served_model.name,
                "processes": {c.name: {"pid": c.pid, "state": c.state, "log": str(c.log_path)} for c in self.children},
            }
        )
        self._on_change(child)

    async def _stop(self) -> None:
        try:
            for kind in ("gateway", ("prefill", "decode"), "redis"):
                await stop_all([c for c in self.children if c.name.startswith(kind)], self.settings.stop_grace_s)
        finally:
            self.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.folder.__exit__()
