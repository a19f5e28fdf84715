"""The list of faults in this package's docstring names tests that exist, and every test file of a fault is in it."""

from __future__ import annotations

import re
from pathlib import Path

import tests.faults

HERE = Path(__file__).parent
LINE = re.compile(r"^(F\d+b?)? +(\S+\.py)(?:::(\w+))?$", re.MULTILINE)


def test_every_listed_test_exists_and_every_file_is_listed() -> None:
    listed = LINE.findall(tests.faults.__doc__ or "")
    missing = []
    for number, name, function in listed:
        path = HERE / name if (HERE / name).exists() else HERE.parent / name
        if not path.is_file() or (function and f"def {function}(" not in path.read_text()):
            missing.append((number, name, function))

    assert listed
    assert not missing
    assert {path.name for path in HERE.glob("test_f[0-9]*.py")} <= {name for _, name, _ in listed}
