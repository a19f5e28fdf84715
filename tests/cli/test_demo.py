from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdq.cli.gateway_client import ChatFailed, is_ready, stream_chat
from pdq.cli.main import main
from tests.cli.conftest import LIMIT_S, assert_nothing_left

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

DEMO = [sys.executable, "-c", "import sys; from pdq.cli.main import main; sys.exit(main())", "demo", "--engine", "sim"]


def demo(port: int, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, "--http-port", str(port), *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_the_demo_shows_the_answer_and_the_table_and_leaves_nothing(roles: Path, port: int) -> None:
    done = demo(port, "--question", "Where is it?")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "question  Where is it?" in done.stdout
    assert "answer    Paris [it] is.\n" in done.stdout
    cells = {tuple(cell.strip() for cell in line.split("│")[1:3]) for line in done.stdout.splitlines() if "│" in line}
    assert {
        ("mode", "pull"),
        ("prefill worker", "prefill-a"),
        ("decode worker", "decode-b"),
        ("prompt tokens", "12"),
        ("queue wait", "1.2 ms"),
        ("time to first token", "51.5 ms"),
        ("KV moved", "2.00 MB as 3 pieces in 2.0 ms: 1.00 GB/s"),
    } <= cells
    assert_nothing_left(roles)


@pytest.mark.parametrize(("question", "said"), [("refuse", "HTTP 400: no such model"), ("fail", "worker lost")])
def test_a_failed_question_is_told_and_leaves_nothing(roles: Path, port: int, question: str, said: str) -> None:
    done = demo(port, "--question", question)

    assert done.returncode == 1
    assert said in done.stdout
    assert_nothing_left(roles)


def test_a_demo_that_does_not_get_ready_shows_the_logs_and_leaves_nothing(roles: Path, port: int) -> None:
    (roles / "gateway" / "__main__.py").write_text("print('not today', flush=True)\nimport time; time.sleep(1000)\n")

    for limit_s in ("2", "30"):  # within the shorter one a busy machine may not have started it yet
        done = demo(port, "--ready-timeout-s", limit_s, "--stop-grace-s", "5")

        assert done.returncode == 2
        assert f"not ready after {limit_s} s" in done.stderr
        assert_nothing_left(roles)
        if "not today" in done.stderr:
            return
    raise AssertionError(done.stderr)


def test_keep_leaves_everything_up_until_ctrl_c(roles: Path, port: int) -> None:
    process = subprocess.Popen(
        [*DEMO, "--http-port", str(port), "--keep"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "pdq status" in line:
                break
        give_up_at = time.monotonic() + LIMIT_S
        while not is_ready(f"http://127.0.0.1:{port}"):  # it is, but may not have answered in time
            assert time.monotonic() < give_up_at
        body = next(line for line in lines if line.startswith("    -d "))
        assert json.loads(body.strip()[4:-1])["model"] == "sim"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)

    assert process.returncode == 0
    assert_nothing_left(roles)


def test_nobody_listening_is_not_ready_and_fails_a_chat(port: int) -> None:
    assert not is_ready(f"http://127.0.0.1:{port}")
    with pytest.raises(ChatFailed, match="broke off"):
        next(stream_chat(f"http://127.0.0.1:{port}", {}, {}, timeout_s=1.0))


def test_the_command_line_names_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert main(["--version"]) == 0

    printed = capsys.readouterr()
    assert "pdq: unknown command 'fly'" in printed.err
    assert "  status" in printed.out
    assert "pdq 0." in printed.out
