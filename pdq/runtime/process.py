"""Runs a role: event loop, signals, exit codes 0 (clean), 1 (fault), 2 (bad settings or machine), and the `ready` line.

def main() -> int:
    loaded = load(GatewaySettings, prog="python -m gateway")
    serve = functools.partial(serve_gateway, loaded.settings)     # async (drain, worker_id) -> None
    return run_role("gateway", loaded.settings.runtime, serve)
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
import uvloop

from pdq.runtime import logs
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.errors import StartupError
from pdq.runtime.ids import worker_id as new_worker_id
from pdq.runtime.signals import Drain, Drained

E = TypeVar("E", bound=BaseException)
Main = Callable[[Drain, str], Coroutine[Any, Any, None]]
"""Serves until the drain is over. Arguments: the drain to obey, and this process's worker id."""

_log = structlog.get_logger(__name__)


def run_role(
    role: str, settings: RuntimeSettings, main: Main, *, cannot_start: tuple[type[BaseException], ...] = ()
) -> int:
    """Configures logs, runs `main` to its end and returns the exit code. `role`: gateway, prefill or decode.

    `cannot_start`: errors that, beside StartupError, mean bad settings or a bad machine.
    """
    worker_id = new_worker_id(role)
    logs.configure(settings.log_level, logs.is_json(settings.log_format), role, worker_id)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_signals(main, worker_id))
    except BaseException as error:  # noqa: BLE001 - the process ends here in any case
        return _exit_code(error, (StartupError, *cannot_start))
    _log.info("stopped")
    return 0


def log_ready(**addresses: object) -> None:
    """The line that says: this process serves. Addresses as keys (`inbox`, `http`, `side_channel`, ...)."""
    _log.info("ready", version=version(), **addresses)


def version() -> str:
    """Of the installed distribution."""
    try:
        return importlib.metadata.version("pdqueue")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def _with_signals(main: Main, worker_id: str) -> None:
    drain = Drain()
    drain.listen(asyncio.get_running_loop())
    await main(drain, worker_id)


def _exit_code(error: BaseException, cannot_start: tuple[type[BaseException], ...]) -> int:
    if _find(error, Drained) is not None:
        _log.info("stopped", reason="asked to stop before it served")
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    startup = next((found for kind in cannot_start if (found := _find(error, kind))), None)
    if startup is not None:
        _log.error("cannot_start", reason=str(startup))
        print(f"can't start: {startup}", file=sys.stderr)
        return 2
    _log.error("fault", exc_info=error)
    return 1


def _find(error: BaseException, kind: type[E]) -> E | None:
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _find(inner, kind))), None)
    return None
