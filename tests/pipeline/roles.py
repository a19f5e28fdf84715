"""One role's process, run by itself: to its end, or until it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.servers import RedisServer

ROLES = ("gateway", "prefill_worker", "decode_worker")
LIMIT_S = 120.0
NO_REDIS = "redis://127.0.0.1:1/0"
"""Nobody answers there: a role that waits for it has passed the checks before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    errors: str
    """What it wrote to stderr."""


def run_to_end(role: str, *flags: str, redis: str = NO_REDIS, environ: Mapping[str, str] | None = None) -> Ended:
    """For start-ups that are refused."""
    command = _command(role, redis, flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=_environ(environ))
    return Ended(code=done.returncode, errors=done.stderr)


@contextmanager
def serving(role: str, server: RedisServer, *flags: str) -> Iterator[dict[str, Any]]:
    """Runs until the block's end; entered once it has logged `ready`, with that line."""
    process = subprocess.Popen(_command(role, server.url, flags), stderr=subprocess.PIPE, text=True, env=_environ(None))
    try:
        assert process.stderr is not None
        line = ""
        while '"event": "ready"' not in line:
            line = process.stderr.readline()
            assert line, f"{role} ended before it served"
        yield json.loads(line)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def _command(role: str, redis: str, flags: tuple[str, ...]) -> list[str]:
    if role == "gateway" and "--http-port" not in flags:
        flags += ("--http-port", "0")
    return [sys.executable, "-m", role, "--redis", redis, "--log-format", "json", *flags]


def _environ(more: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PDQ_", "MC_"))}
    return inherited | {"PYTHONUNBUFFERED": "1"} | dict(more or {})
