"""Starts small Python programs for tests and waits for what they print."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 90


@contextmanager
def program(code: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A running `python -c code`; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
