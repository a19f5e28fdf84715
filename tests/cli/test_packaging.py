"""The wheel holds exactly our packages, with their data files; the make targets and scripts exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

ROOT = Path(__file__).parents[2]
PACKAGES = {"broker", "connector", "decode_worker", "engine", "gateway", "pdq", "prefill_worker"}
TARGETS = ["help", "demo", "check", "test", "test-long", "test-vllm", "vllm-cpu", "parity", "format", "clean"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the work tree and nothing old gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in [*PACKAGES, "tests"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("pdqueue-*.whl"))


def test_the_wheel_holds_every_file_of_our_packages_and_nothing_else(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".lua")
    }

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert packed == expected
    assert any(name.startswith("broker/lua/") for name in packed)


def test_the_wheel_can_not_be_uploaded_by_mistake_and_brings_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)

    assert "Classifier: Private :: Do Not Upload" in archive.read(f"{folder}/METADATA").decode()
    entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    assert "pdq = pdq.cli.main:main" in entry_points
    assert "[vllm.general_plugins]\npdq = connector.plugin:register" in entry_points


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_make_help_names_what_a_person_needs() -> None:
    printed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert all(f"make {target}" in printed for target in ("demo", "test", "check"))


@pytest.mark.parametrize(
    "script", [".ci/run", "scripts/install.sh", "scripts/system-packages.sh", "scripts/vllm-cpu.sh"]
)
def test_scripts_can_be_run_and_parsed(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_ci_fails_when_either_of_its_two_targets_fails_and_runs_both(tmp_path: Path) -> None:
    root, tools = tmp_path / "root", tmp_path / "tools"
    (root / ".ci").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
    make = tools / "make"
    make.write_text('#!/bin/sh\necho "$2" >>targets\n[ "$2" != "$FAILING" ]\n')
    make.chmod(0o755)
    codes = {}
    for failing in ("none", "test", "test-vllm"):
        environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "FAILING": failing}
        codes[failing] = subprocess.run([root / ".ci" / "run"], env=environ, check=False).returncode

    assert codes == {"none": 0, "test": 1, "test-vllm": 1}
    assert (root / "targets").read_text().split() == ["test", "test-vllm"] * 3
