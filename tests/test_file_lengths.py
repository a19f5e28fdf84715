"""No source file is longer than 300 lines: past that it has more than one job."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300
SKIPPED = {".venv", "build", "dist", ".git", "node_modules"}


def test_no_source_file_is_longer_than_300_lines() -> None:
    files = [
        path
        for pattern in ("*.py", "*.lua", "*.sh")
        for path in ROOT.rglob(pattern)
        if not SKIPPED & set(path.relative_to(ROOT).parts)
    ]

    too_long = {
        str(path.relative_to(ROOT)): num_lines
        for path in files
        if (num_lines := len(path.read_text(encoding="utf-8").splitlines())) > LIMIT
    }

    assert files
    assert too_long == {}
