"""The engine process: `python -m engine.embedded.process SOCKET_FD PARENT_PID`, started by `client.py` only.

It ends when told to, when its worker is gone (end of the stream, and the kernel's parent-death signal), or when it
can't go on. Signals are the worker's business: Ctrl-C, or a SIGTERM to the whole process group, must not end the
engine before its worker has drained.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time
from typing import Final

import structlog

from connector.layout import LayoutError
from connector.transport import TransportError
from engine.base import StepOutputs
from engine.embedded.boot import boot
from engine.embedded.core import CoreFailed, EngineCore
from engine.embedded.held_steps import HeldSteps
from engine.embedded.messages import Fatal, Launch, Progress, Ready, StartFailed, Stop, unpack_launch
from engine.embedded.pipe import EnginePipe, ParentGone
from engine.embedded.runner import RunnerError
from pdq.runtime import logs
from pdq.runtime.signals import die_with_parent

_BEAT_S: Final = 1.0
"""A sign of life at least this often."""
_QUICK_STEP_S: Final = 0.002
"""Only after steps as short as this is it worth while to wait for the worker: the next step follows at once."""
_MAX_HELD: Final = 16
"""Steps that one message may stand for."""

_log = structlog.get_logger(__name__)


def main(argv: list[str]) -> int:
    """0: told to stop; 1: could not start, or failed; 3: the worker is gone."""
    descriptor, parent_pid = (int(word) for word in argv)
    die_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = EnginePipe(socket.socket(fileno=descriptor))
    try:
        launch = unpack_launch(pipe.receive_first())
        identity = launch.identity
        logs.configure(identity.log_level, identity.log_json, f"engine-{identity.role}", identity.worker_id)
        return _run(launch, pipe)
    except ParentGone as error:
        _log.info("worker_gone", reason=str(error))
        return 3
    finally:
        pipe.close()


def _run(launch: Launch, pipe: EnginePipe) -> int:
    try:
        core, info = boot(launch, report=lambda text: pipe.send(Progress(text=text)), on_progress=pipe.wake)
    except ParentGone:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the worker must be told why there is no engine
        is_expected = isinstance(error, RunnerError | TransportError | LayoutError | OSError)
        _log.error("engine_start_failed", reason=str(error), exc_info=None if is_expected else error)
        pipe.send(StartFailed(text=str(error) if is_expected else f"{type(error).__name__}: {error}"))
        return 1
    gc.collect()
    gc.freeze()  # what start-up made stays; without it each full collection walks the model's modules
    pipe.send(Ready(info=info))
    try:
        _serve(core, pipe)
        return 0
    except ParentGone:
        raise
    except Exception as error:  # noqa: BLE001 - the process ends; the worker must be told why
        is_expected = isinstance(error, CoreFailed)
        _log.error("engine_failed", reason=str(error), exc_info=None if is_expected else error)
        pipe.send(Fatal(text=str(error) if is_expected else f"{type(error).__name__}: {error}"))
        return 1
    finally:
        core.close()


def _serve(core: EngineCore, pipe: EnginePipe) -> None:
    """Steps while there is something to do; sleeps until a message, the connector or the next beat otherwise.

    A worker that hasn't taken the last message yet gets the following steps as one.
    """
    next_beat_s = time.monotonic()
    held = HeldSteps()

    def beat_inside_a_long_step() -> None:
        nonlocal next_beat_s
        if time.monotonic() >= next_beat_s:
            pipe.send(StepOutputs(outputs=(), released=(), stats=core.stats()))
            next_beat_s = time.monotonic() + _BEAT_S

    core.on_layer = beat_inside_a_long_step
    while True:
        timeout_s = 0.0 if core.is_busy else max(0.0, next_beat_s - time.monotonic())
        messages, is_awake = pipe.receive(timeout_s)
        for message in messages:
            if isinstance(message, Stop):
                return
            core.handle(message)
        began_s = time.monotonic()
        is_beat = began_s >= next_beat_s
        if not (core.is_busy or is_awake or is_beat):
            continue
        step = core.step()
        ended_s = time.monotonic()
        if step.outputs or step.released or is_beat:
            held.add(step)
        if not held.num_steps:
            continue
        can_wait = core.is_busy and ended_s - began_s < _QUICK_STEP_S and held.num_steps < _MAX_HELD and not is_beat
        if not (can_wait and pipe.is_behind()):
            pipe.send(held.take())
            next_beat_s = ended_s + _BEAT_S


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
