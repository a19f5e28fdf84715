"""A folder with stand-ins for the roles: started there, `python -m gateway` is the stand-in."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import structlog

from tests.servers import free_port

LIMIT_S = 90
"""Of what takes the start of several processes, one after the other."""


@pytest.fixture(autouse=True)
def _logs_of_this_test_only() -> Iterator[None]:
    """A command sets up logs on the test's stderr, which is closed afterwards."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test; children find the stand-ins there first."""
    shutil.copytree(Path(__file__).parent / "fake_roles", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()


def processes_in(folder: Path) -> list[psutil.Process]:
    """All processes whose working folder is `folder`, this one apart: what a deployment started there."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.pid != psutil.Process().pid:
                found.append(process)
        except psutil.Error:
            continue  # gone meanwhile, or not ours
    return found


def names_of(processes: list[psutil.Process]) -> list[str]:
    """Of those that are still there."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.name())
    return found


def assert_nothing_left(folder: Path) -> None:
    """Killed processes take a moment to vanish."""
    _, alive = psutil.wait_procs(processes_in(folder), timeout=LIMIT_S)
    assert [process.cmdline() for process in alive] == []
