"""The pair of engines that all tests of this folder share, in the order of the files' names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.models.__main__ import default_cache_dir
from engine.models.store import prepare_model
from tests.vllm.pair import Pair, running_pair
from tests.vllm.reference import MODEL

PROVOKED: tuple[str, ...] = ()
"""In the logs, by the tests that kill a worker."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    model_dir = prepare_model(MODEL, default_cache_dir())
    async with running_pair(tmp_path_factory.mktemp("vllm"), model_dir, allowed_faults=PROVOKED) as pair:
        yield pair


@pytest_asyncio.fixture(loop_scope="package")
async def pair(shared_pair: Pair) -> AsyncIterator[Pair]:
    """Quiet before and after each test."""
    await shared_pair.quiet()
    yield shared_pair
    await shared_pair.quiet()
