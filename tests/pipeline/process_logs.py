"""Reads what the processes of a deployment logged, and finds what should not be there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOISE_LINES = 2000
"""More lines than this in one short test are log spam."""
_MOONCAKE = re.compile(r"WARNING: Logging before InitGoogleLogging|[IWE]\d{4} \d\d:\d\d:\d\d")
"""Its library writes to stderr what it thinks; what matters of it is logged by the connector."""


def records(log_dir: Path, name: str = "*") -> Iterator[tuple[str, dict[str, Any]]]:
    """(process, record) of every JSON line."""
    for path in sorted(log_dir.glob(f"{name}.log")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("{"):
                yield path.stem, json.loads(line)


def events(log_dir: Path, event: str, name: str = "*") -> list[dict[str, Any]]:
    return [record for _, record in records(log_dir, name) if record.get("event") == event]


def faults(log_dir: Path, *, allowed: tuple[str, ...] = (), noise_lines: int = NOISE_LINES) -> list[str]:
    """Lines at level error, tracebacks, and whatever is no JSON. `allowed`: events or texts that a test provokes."""
    found = []
    for path in sorted(log_dir.glob("*.log")):
        if path.stem == "redis":
            continue
        lines = path.read_text(errors="replace").splitlines()
        if len(lines) > noise_lines:
            found.append(f"{path.stem}: {len(lines)} lines, e.g. {lines[len(lines) // 2][:200]}")
        for line in lines:
            if not line or _MOONCAKE.match(line):
                continue
            is_fault = not line.startswith("{") or json.loads(line).get("level") in ("error", "critical")
            if is_fault and not any(text in line for text in allowed):
                found.append(f"{path.stem}: {line[:1500]}")
    return found
