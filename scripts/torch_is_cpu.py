"""Refuses to go on when pip would fetch a CUDA build of torch, several GB. Run with the Python of .venv."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ADVICE = """\
pip would fetch a CUDA build of torch: {packages} and more, several GB that a demo on the CPU doesn't need.

Point pip at a CPU build of torch {version} and try again. One of these:
  - from PyTorch's own index for CPU builds (its address is under "CPU" at PyTorch's "Get started" page):
      .venv/bin/pip install torch=={version} --index-url ADDRESS
  - from a wheel file in a folder:
      PIP_FIND_LINKS=FOLDER make demo

Or do without torch and without a model:
      make demo ENGINE=sim
"""


def main() -> int:
    version = _pinned_version()
    if _installed_version() == version:
        return 0
    packages = _cuda_packages(f"torch=={version}")
    if packages:
        print(ADVICE.format(packages=", ".join(packages[:3]), version=version), file=sys.stderr)
        return 1
    return 0


def _pinned_version() -> str:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = project["project"]["optional-dependencies"]["local"]
    return next(match[1] for r in requirements if (match := re.fullmatch(r"torch==(\S+)", r)))


def _installed_version() -> str:
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda_packages(requirement: str) -> list[str]:
    """What pip would install of NVIDIA's packages; empty also when pip fails, which the installation then shows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "-qq", "--report", str(report), requirement]
        if subprocess.run(command, check=False).returncode != 0:
            return []
        names = [item["metadata"]["name"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return sorted(name for name in names if name.lower().startswith(("nvidia-", "cuda-")))


if __name__ == "__main__":
    raise SystemExit(main())
