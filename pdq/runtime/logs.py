"""structlog set-up: JSON lines in production, coloured lines on a terminal; foreign loggers come out in the same form.

Every line has `timestamp` (ISO, UTC), `level`, `event`, `role`, `worker_id`, `logger`, and what was bound with
`structlog.contextvars.bind_contextvars(request_id=...)` in the running task.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import Processor


def configure(
    level: str = "info",
    json: bool | None = None,
    role: str = "",
    worker_id: str = "",
    *,
    stream: TextIO | None = None,
) -> None:
    """Sets up all logs of this process. `json=None`: console on a terminal, else JSON. `stream` defaults to stderr."""
    stream = stream or sys.stderr
    json = not stream.isatty() if json is None else json
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Process(role, worker_id),
    ]
    render: list[Processor] = [
        _in_reading_order,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),
    ]
    if not json:
        plain = structlog.dev.plain_traceback  # the rich one shows local variables, which may hold prompts
        render = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=_NamedLoggers(stream),
        cache_logger_on_first_use=True,
    )
    _route_foreign_loggers(stream, max(number, logging.WARNING), shared, render)


def is_json(log_format: str) -> bool | None:
    """RuntimeSettings.log_format as `configure`'s `json`."""
    return {"json": True, "console": False}.get(log_format)


def _in_reading_order(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """When, how bad, what; then the keys."""
    return {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event} | dict(event)


class _Process:
    """Adds who writes: role, worker id and the logger's name."""

    def __init__(self, role: str, worker_id: str) -> None:
        self._role = role
        self._worker_id = worker_id

    def __call__(self, logger: Any, _: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if self._role:
            event.setdefault("role", self._role)
        if self._worker_id:
            event.setdefault("worker_id", self._worker_id)
        name = getattr(logger, "name", "")
        if name:
            event.setdefault("logger", name)
        return event


class _NamedLogger(structlog.WriteLogger):
    def __init__(self, stream: TextIO, name: str) -> None:
        super().__init__(stream)
        self.name = name


class _NamedLoggers:
    """Makes the loggers of `structlog.get_logger(__name__)`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, *args: Any) -> _NamedLogger:
        return _NamedLogger(self._stream, str(args[0]) if args else "")


def _route_foreign_loggers(stream: TextIO, level: int, shared: list[Processor], render: list[Processor]) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
