"""`pdq up`: everything on this machine until Ctrl-C. Exit code 0, 1 after a fault, 2 when something can't start."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from pdq.cli.children import Child
from pdq.cli.deployment import Deployment
from pdq.cli.deployment_settings import DeploymentSettings
from pdq.runtime import logs
from pdq.runtime.errors import StartupError
from pdq.runtime.setting_fields import settings_of
from pdq.runtime.settings import environment, load
from pdq.runtime.signals import Drain


def main(argv: Sequence[str]) -> int:
    loaded = load(DeploymentSettings, argv, prog="pdq up", description=__doc__.split(":", 1)[1].split(".")[0].strip())
    console = Console(highlight=False)
    deployment = deployment_of(
        loaded.settings, DeploymentSettings, loaded.config_path, on_change=lambda child: _print_change(console, child)
    )

    async def serve(drain: Drain) -> None:
        async with deployment:
            console.print(f"starting; logs in {deployment.folder.log_dir}; Ctrl-C stops everything", soft_wrap=True)
            if await until_drain(drain, deployment.wait_until_ready()):
                return
            console.print(
                f"[bold green]ready[/]  {loaded.settings.url}  (Redis: {deployment.redis_url})", soft_wrap=True
            )
            await until_drain(drain, deployment.wait_failed())

    return run(serve, deployment)


def deployment_of(
    settings: DeploymentSettings,
    cls: type,
    config_path: Path | None,
    *,
    defaults: Mapping[str, str] | None = None,
    on_change: Callable[[Child], None],
) -> Deployment:
    """Of these settings, loaded as `cls`; the roles get this process's environment and TOML file.

    `defaults`: variables that hold where the environment says nothing else.
    """
    flags = ("--config", str(config_path)) if config_path else ()
    environ = {**(defaults or {}), **role_environment(environment(), cls)}
    return Deployment(settings, environ=environ, role_flags=flags, on_change=on_change)


def role_environment(environ: Mapping[str, str], cls: type) -> dict[str, str]:
    """Without the settings of this command itself (`cls`): a role refuses names that it doesn't know."""
    own = {f"PDQ_{setting.name.upper()}" for setting in settings_of(cls)} | {"PDQ_CONFIG"}
    kept = {name: value for name, value in environ.items() if name not in own}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def run(serve: Callable[[Drain], Awaitable[None]], deployment: Deployment) -> int:
    """Runs `serve` with signals turned into a drain; the second signal kills the processes at once."""
    logs.configure("warning", json=False)

    async def with_signals() -> None:
        drain = Drain(on_force=deployment.kill)
        drain.listen(asyncio.get_running_loop())
        await serve(drain)

    try:
        asyncio.run(with_signals())
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def until_drain(drain: Drain, work: Awaitable[None]) -> bool:
    """True: the drain came first and `work` was cancelled. Raises what `work` raises."""
    working = asyncio.ensure_future(work)
    draining = asyncio.create_task(drain.wait())
    try:
        await asyncio.wait([working, draining], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return not working.done()
    finally:
        for task in (working, draining):
            task.cancel()
        await asyncio.gather(working, draining, return_exceptions=True)


def _print_change(console: Console, child: Child) -> None:
    pid = f" pid {child.pid}" if child.pid else ""
    console.print(f"{child.name:<12}{child.state}[dim]{pid}[/]")
