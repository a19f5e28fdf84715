from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pdq.cli.redis_server import server_command, wait_until_serving
from tests.cli.conftest import LIMIT_S, assert_nothing_left, names_of, processes_in
from tests.servers import free_port

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

UP = [sys.executable, "-c", "import sys; from pdq.cli.main import main; sys.exit(main())", "up", "--engine", "sim"]


@contextmanager
def up(port: int, *flags: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*UP, "--http-port", str(port), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environ},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def read_until(process: subprocess.Popen[str], start: str) -> list[str]:
    """Lines up to the first that starts with `start`."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError("ended without " + start + ":\n" + "\n".join(lines))


def until_started(folder: Path, *names: str) -> None:
    """Waits until these workers listen to signals: they say a line then."""
    deadline = time.monotonic() + LIMIT_S
    logs = [folder / ".pdq" / "log" / f"{name}.log" for name in names]
    while not all(log.exists() and log.stat().st_size for log in logs):
        assert time.monotonic() < deadline, f"no line in one of {logs}"
        time.sleep(0.02)


def test_up_starts_everything_and_sigterm_stops_gateway_then_workers_then_redis(roles: Path, port: int) -> None:
    with up(port, "--prefill", "2") as process:
        ready = read_until(process, "ready")[-1]
        content = json.loads((roles / ".pdq" / "up.json").read_text())
        until_started(roles, "prefill-1", "prefill-2", "decode-1")
        process.terminate()
        rest, _ = process.communicate(timeout=LIMIT_S)

    assert f"http://127.0.0.1:{port}" in ready
    assert list(content["processes"]) == ["redis", "gateway-1", "prefill-1", "prefill-2", "decode-1"]
    assert process.returncode == 0
    stops = (roles / "stops.txt").read_text().split()
    assert stops[0] == "gateway"
    assert sorted(stops[1:]) == ["decode_worker", "prefill_worker", "prefill_worker"]
    assert rest.splitlines()[-1].split() == ["redis", "stopped"]
    assert not (roles / ".pdq" / "up.json").exists()
    assert_nothing_left(roles)


def test_nothing_is_left_when_up_itself_is_killed(roles: Path, port: int) -> None:
    with up(port) as process:
        read_until(process, "ready")
        until_started(roles, "prefill-1", "decode-1")
        assert len(processes_in(roles)) >= 4
        process.kill()
        process.wait(LIMIT_S)

        deadline = time.monotonic() + LIMIT_S
        while left := [name for name in names_of(processes_in(roles)) if name != "sleep"]:  # a real engine dies, too
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
    for engine in processes_in(roles):
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


def test_a_second_signal_kills_workers_that_do_not_stop(roles: Path, port: int) -> None:
    with up(port, FAKE_WORKER="deaf") as process:
        read_until(process, "ready")
        until_started(roles, "prefill-1", "decode-1")  # they are deaf from then on
        process.send_signal(signal.SIGINT)
        read_until(process, "decode-1    stopping")
        process.send_signal(signal.SIGINT)

        assert process.wait(LIMIT_S) == 1
    assert_nothing_left(roles)


def test_a_role_that_can_not_start_stops_all_and_its_reason_is_shown(roles: Path, port: int) -> None:
    with up(port, FAKE_WORKER="bad settings") as process:
        printed, _ = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert "can't start" in printed
    assert "--model is missing" in printed
    assert_nothing_left(roles)


def test_a_killed_worker_comes_back(roles: Path, port: int) -> None:
    with up(port, "--restart-min-s", "0.05") as process:
        read_until(process, "ready")
        pid = json.loads((roles / ".pdq" / "up.json").read_text())["processes"]["prefill-1"]["pid"]
        os.kill(pid, signal.SIGKILL)

        read_until(process, "prefill-1   killed by SIGKILL")
        read_until(process, "prefill-1   running")
        process.terminate()
        process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0
    assert_nothing_left(roles)


def test_a_taken_port_is_refused_before_anything_starts(roles: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with up(port) as process:
            printed, _ = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert f"port {port} on 127.0.0.1 (--http-port) is taken" in printed
    assert not (roles / ".pdq").exists()


def test_a_second_up_in_the_same_folder_is_refused(roles: Path, port: int) -> None:
    with up(port) as first:
        read_until(first, "ready")
        with up(free_port()) as second:
            printed, _ = second.communicate(timeout=LIMIT_S)

        assert second.returncode == 2
        assert f"another `pdq up` (pid {first.pid}) uses the run folder" in printed
        first.terminate()
        first.communicate(timeout=LIMIT_S)
    assert_nothing_left(roles)


def test_roles_get_only_the_variables_that_are_theirs(roles: Path, port: int) -> None:
    with up(port, PDQ_PREFILL="1", PDQ_DECODE_WORKER__X="1", PDQ_LOG_LEVEL="debug") as process:
        read_until(process, "ready")
        logs = roles / ".pdq" / "log"
        until_said(logs / "decode-1.log", "['PDQ_DECODE_WORKER__X']")
        until_said(logs / "gateway-1.log", "'--log-level', 'debug'")
        process.terminate()
        process.communicate(timeout=LIMIT_S)


async def test_the_embedded_server_keeps_its_data_over_a_kill(tmp_path: Path, port: int) -> None:
    answers = []
    for command in ("SET key kept", "GET key"):
        server = await asyncio.create_subprocess_exec(*server_command(tmp_path, port), stdout=subprocess.DEVNULL)
        try:
            await wait_until_serving(port, LIMIT_S)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"CONFIG SET appendfsync always\r\n{command}\r\n".encode())
            assert await reader.readline() == b"+OK\r\n"
            answers.append(await reader.readline())
            if command.startswith("GET"):
                answers.append(await reader.readline())
            writer.close()
            await writer.wait_closed()
        finally:
            server.kill()
            await server.wait()

    assert answers == [b"+OK\r\n", b"$4\r\n", b"kept\r\n"]


async def test_a_redis_given_by_url_is_used_and_not_stopped(roles: Path, port: int, tmp_path: Path) -> None:
    with up(port, "--redis", "redis://127.0.0.1:1/0") as process:
        ready = read_until(process, "ready")[-1]
        names = list(json.loads((roles / ".pdq" / "up.json").read_text())["processes"])
        process.terminate()
        process.communicate(timeout=LIMIT_S)

    assert ready.endswith("(Redis: redis://127.0.0.1:1/0)")
    assert names == ["gateway-1", "prefill-1", "decode-1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prefill", "-1"], "0 or more"),
        (["--gateways", "0", "--prefill", "0", "--decode", "0"], "nothing to run"),
        (["--engine", "vulkan"], "one of torch, sim"),
    ],
)
def test_senseless_numbers_are_refused(roles: Path, port: int, flags: list[str], said: str) -> None:
    with up(port, *flags) as process:
        printed, _ = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert said in printed


def until_said(log: Path, text: str) -> None:
    """The deployment is ready when its gateway is: other processes may not have written a word yet."""
    deadline = time.monotonic() + LIMIT_S
    while text not in (said := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
