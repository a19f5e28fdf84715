"""The folder of a deployment on this machine: who runs where, and the logs. One deployment per folder at a time.

up.json            addresses and pids, for people and for `pdq status`
lock               held (flock) as long as the deployment runs
log/<name>.log     what each process printed
redis/             data of the embedded server
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from pdq.runtime.errors import StartupError
from pdq.runtime.ids import host_name


class RunFolder:
    """Use as a context manager: entering takes the lock or raises StartupError, leaving removes `up.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.log_dir = self.path / "log"
        self.redis_dir = self.path / "redis"
        self._lock: TextIO | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise StartupError(f"can't write the run folder {self.path}: {error}; choose another --run-dir") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StartupError(
                f"another `pdq up` (pid {read_up(self.path).get('pid', 'unknown')}) uses the run folder {self.path}; "
                "stop it or choose another --run-dir"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        (self.path / "up.json").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()

    def log_path(self, name: str) -> Path:
        return self.log_dir / f"{name}.log"

    def write_up(self, content: Mapping[str, object]) -> None:
        """Replaces `up.json` in one step."""
        partial = self.path / "up.json.partial"
        partial.write_text(json.dumps({"pid": os.getpid(), **content}, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / "up.json")


def read_up(path: Path) -> dict[str, object]:
    """Content of `up.json`; empty when nothing runs there."""
    try:
        content = json.loads((path / "up.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def row_name(path: Path) -> str:
    """What the `pdq up` of this folder is called among those of all hosts."""
    return f"{host_name()}:{path.resolve()}"
