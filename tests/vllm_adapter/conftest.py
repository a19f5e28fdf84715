"""Real engines take a minute to start: one per module."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def own_environment() -> Iterator[None]:
    """What an engine sets for its processes must not reach other tests, nor what a vLLM leaves that can't start."""
    before = dict(os.environ)
    yield
    gc.collect()  # its ZeroMQ contexts say that nobody closed them: while this module's filter of warnings holds
    os.environ.clear()
    os.environ.update(before)
