"""The README's commands exist, take the flags they are shown with, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import free_port

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
LONG_RUNNING = ("pdq up", "python -m ")
ASKS_A_SERVER = ("pdq status", "pdq top", "pdq scale", "pdq drain", "pdq dead")


def test_there_are_commands_and_the_two_first_are_demo_and_test() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(LONG_RUNNING)])
def test_processes_take_the_flags_they_are_shown_with(command: str) -> None:
    words = shlex.split(command)
    program = [sys.executable, "-m", "pdq.cli.main"] if words[0] == "pdq" else [sys.executable]
    done = subprocess.run(
        [*program, *words[1:], "--print-config"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(ASKS_A_SERVER)])
def test_operators_commands_take_the_words_they_are_shown_with_and_say_who_is_missing(
    command: str, tmp_path: Path
) -> None:
    words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", "pdq.cli.main", *words[1:], "--redis", "redis://127.0.0.1:1/0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("role", ["gateway", "prefill_worker", "decode_worker"])
@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", README, re.S))
def test_settings_files_can_be_loaded_by_every_role(text: str, role: str, tmp_path: Path) -> None:
    path = tmp_path / "pdq.toml"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", role, "--config", str(path), "--print-config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)

    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("mode", ["push", "pull", "local"])
def test_the_demo_answers_and_leaves_nothing_running(mode: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pdq.cli.main",
            "demo",
            "--engine",
            "sim",
            "--mode",
            mode,
            "--http-port",
            str(free_port()),
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "capital of France" in done.stdout
    assert mode in done.stdout
