"""How a role's process ends: signals, exit codes, the parent's death. With real processes."""

from __future__ import annotations

import json
import os
import signal
import sys

import psutil
import pytest

from tests.runtime.processes import LIMIT_S, line_of, program

ROLE = """
import asyncio, sys
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.errors import PortTaken
from pdq.runtime.process import log_ready, run_role

async def main(drain, worker_id):
    log_ready(http="http://127.0.0.1:1")
    print("up", flush=True)
    {body}

raise SystemExit(run_role("gateway", RuntimeSettings(log_format="json"), main))
"""


def role(body: str) -> str:
    return ROLE.format(body=body)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_process_ends_clean(number: signal.Signals) -> None:
    with program(role("await drain.wait(); print(drain.reason, flush=True)")) as process:
        assert line_of(process) == "up"
        process.send_signal(number)

        assert line_of(process) == number.name
        assert process.wait(LIMIT_S) == 0


def test_the_second_signal_ends_a_drain_that_takes_too_long() -> None:
    with program(role("await drain.wait(); print('draining', flush=True); await asyncio.Event().wait()")) as process:
        assert line_of(process) == "up"
        process.terminate()
        assert line_of(process) == "draining"
        process.terminate()

        assert process.wait(LIMIT_S) == 1


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("pass", 0, "stopped"),
        ("raise PortTaken('port 1 is taken')", 2, "can't start: port 1 is taken"),
        ("raise ExceptionGroup('x', [PortTaken('port 2 is taken')])", 2, "can't start: port 2 is taken"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
        ("raise SystemExit(2)", 2, ""),
    ],
)
def test_the_exit_code_says_how_it_went(body: str, code: int, said: str) -> None:
    with program(role(body)) as process:
        _, errors = process.communicate(timeout=LIMIT_S)

        assert process.returncode == code
        assert said in errors


def test_the_ready_line_has_role_version_worker_id_and_addresses() -> None:
    with program(role("pass")) as process:
        _, errors = process.communicate(timeout=LIMIT_S)

    first = json.loads(errors.splitlines()[0])
    assert first["event"] == "ready"
    assert first["role"] == "gateway"
    assert first["http"] == "http://127.0.0.1:1"
    assert first["version"]
    assert first["worker_id"].startswith("gateway-")
    assert first["timestamp"].endswith("Z")


def test_a_child_dies_with_its_killed_parent() -> None:
    parent = """
import subprocess, sys, time
from pdq.runtime.child import command_of_child
child = subprocess.Popen(command_of_child(["sleep", "1000"]))
print(child.pid, flush=True)
sys.stdin.read() if sys.argv[1:] else time.sleep(1000)
"""
    with program(parent) as process:
        child = psutil.Process(int(line_of(process)))
        process.kill()

        gone, alive = psutil.wait_procs([child], timeout=LIMIT_S)
        assert alive == []
        assert gone == [child]


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    nobody = str(os.getppid())  # our own parent: the program's parent is another process, this one
    code = "import sys; from pdq.runtime.child import main; sys.exit(main(sys.argv[1:]))"

    with program(code, nobody, "--", sys.executable, "-c", "print('started')") as process:
        printed, _ = process.communicate(timeout=LIMIT_S)

    assert printed == ""
    assert process.returncode == -signal.SIGKILL


def test_a_command_that_can_not_be_run_is_named() -> None:
    code = "import os, sys; from pdq.runtime.child import main; sys.exit(main([str(os.getppid()), '--', 'no-such']))"

    with program(code) as process:
        _, errors = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 127
    assert "can't run no-such" in errors
