"""A whole deployment starts in nearly every test of this folder: on a busy machine that takes long.

A test with a limit of its own keeps that one.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800 if item.get_closest_marker("long") else 300))
