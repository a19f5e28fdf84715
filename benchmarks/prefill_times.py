"""When prefills ended: written by a connector inside P's engine core, read by the benchmark. One JSON object a line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "BENCH_PREFILL_TIMES"
"""Names the file to engines: vLLM hands nothing else down to every connector."""


def write(num_tokens: int) -> None:
    """Now, of `time.monotonic`, which all processes of a machine share."""
    at = time.monotonic()
    with Path(os.environ[VARIABLE]).open("a") as file:  # noqa: TID251
        file.write(json.dumps({"at": at, "num_tokens": num_tokens}) + "\n")


class PrefillTimes:
    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self._num_read = 0

    @property
    def environ(self) -> dict[str, str]:
        return {VARIABLE: str(self._path)}

    def only_new(self, num_tokens: int) -> float:
        """Raises RuntimeError unless exactly one prefill has ended since the last call, of so many tokens."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines()][self._num_read :]
        self._num_read += len(lines)
        if [line["num_tokens"] for line in lines] != [num_tokens]:
            raise RuntimeError(f"prefills of {lines} ended for one request of {num_tokens} tokens")
        return float(lines[0]["at"])
