"""vLLM's child processes (engine core, ranks) of a worker: its logs, its failures, its end.

vLLM loads `register` in each of its processes (entry point `pdq_child`). Without a worker above it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

from engine.vllm.environment import CHILD_VARIABLE, Child
from engine.vllm.refusals import is_refusal
from pdq.runtime import logs
from pdq.runtime.settings import environment

_NUM_FAILURES: Final = 20
_registered: list[Child] = []


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that one of vLLM's processes logged."""

    text: str
    is_refusal: bool
    """The configuration or the machine can't do, see `refusals`."""


def register() -> None:
    """May be called any number of times, as vLLM does."""
    text = environment().get(CHILD_VARIABLE)
    parent = multiprocessing.parent_process()
    if not text or parent is None or _registered:
        return
    child = Child.from_text(text)
    _registered.append(child)
    # Ctrl-C goes to every process of a terminal, but it is the worker's to drain and to stop its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with, args=(parent.sentinel,), name="pdq-parent-watch", daemon=True).start()
    logs.configure(child.log_level, child.log_json, child.role, child.worker_id)
    logging.captureWarnings(True)
    logging.getLogger("vllm").addHandler(FailureFile(Path(child.failures_path)))


def read_failures(path: Path) -> list[Failure]:
    """Oldest first, without repetitions. A process that was killed may have left half a line."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            found.append(Failure(**json.loads(line)))
    return list(dict.fromkeys(found))


class FailureFile(logging.Handler):
    """Keeps what an exception said, so that the worker can say why its engine failed."""

    def __init__(self, path: Path) -> None:
        super().__init__(level=logging.ERROR)
        self._path = path
        self._left = _NUM_FAILURES

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or self._left == 0:
            return
        self._left -= 1
        failure = Failure(f"{type(error).__name__}: {error}", is_refusal(error))
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(failure)) + "\n")
        except OSError:
            self.handleError(record)


def _die_with(sentinel: int) -> None:
    """vLLM's engine core doesn't notice that its parent was killed: it would keep memory, ports and the device."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
