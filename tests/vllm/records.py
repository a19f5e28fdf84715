"""What `recording` wrote, read back by the test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "RECORDS_FOLDER"
HOLD: Final = "hold"


@dataclass(frozen=True, slots=True)
class Records:
    folder: Path

    @property
    def environ(self) -> Mapping[str, str]:
        return {FOLDER: str(self.folder)}

    def events(self, event: str, *, after: float = 0.0, **wanted: object) -> list[dict[str, Any]]:
        """In the order of their times; only those that hold all of `wanted`."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            text = path.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                record = json.loads(line)
                is_wanted = all(record.get(key) == value for key, value in wanted.items())
                if record["event"] == event and record["at"] > after and is_wanted:
                    found.append(record)
        return sorted(found, key=lambda record: record["at"])

    def hold(self) -> None:
        """Transfers stop after their next call, until `release`."""
        (self.folder / HOLD).touch()

    def release(self) -> None:
        (self.folder / HOLD).unlink(missing_ok=True)
