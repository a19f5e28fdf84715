"""Real engines take a minute to start: one per module."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_environment() -> Iterator[None]:
    """What an engine sets for its processes must not reach other tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
