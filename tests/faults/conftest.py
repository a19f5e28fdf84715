"""One deployment without workers per mode, for all tests of this folder that need no other settings.

Each test brings its workers (`stage`) and its ledger, and is judged at its end by `invariants.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults import invariants
from tests.faults.stage import Stage, staged
from tests.pipeline.harness import Pipeline, print_logs, shared
from tests.pipeline.ledger import Ledger

HAS_PASSED = pytest.StashKey[bool]()
LEASE_S = 2.0
HEARTBEAT_S = 0.5
STALL_S = 6.0
"""Of the gateway. A busy machine lets a process wait for a second or two; a stall that is one is F8's."""
RECOVERY_S = LEASE_S + HEARTBEAT_S + 6.0
"""I5, and what a loaded machine may add to it."""
ENVIRON = {
    "PDQ_HEARTBEAT_S": str(HEARTBEAT_S),
    "PDQ_REGISTRY_TTL_S": "2",
    "PDQ_REDIS_GAP_S": "1.2",
    "PDQ_PREFILL_WORKER__LEASE_S": str(LEASE_S),
    "PDQ_PREFILL_WORKER__PREFILL_STALL_S": "20",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_DECODE_WORKER__DECODE_STALL_S": "20",
    # What became of a request is read at the end of its test, and compared: until then nothing of it runs out.
    "PDQ_PREFILL_WORKER__REQ_TTL_S": "3600",
    "PDQ_GATEWAY__REQ_TTL_S": "3600",
    **{f"PDQ_{role}_WORKER__KV_ANSWER_S": "0.3" for role in ("PREFILL", "DECODE")},
    **{f"PDQ_{role}_WORKER__KV_LEASE_S": "3" for role in ("PREFILL", "DECODE")},
    "PDQ_GATEWAY__STALL_S": str(STALL_S),
    "PDQ_GATEWAY__OWNER_SILENCE_S": "1",
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "8",
    "PDQ_GATEWAY__MAX_MIGRATIONS": "8",
}

NOISE_LINES = 30_000
"""Of the gateway over all tests, long ones too, that logs a line per request."""


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=["pull", "push"])
async def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"mode": request.param, "environ": ENVIRON, "noise_lines": NOISE_LINES}
    async with shared(folder, prefill=0, decode=0, **settings) as deployment:
        yield deployment


@pytest.hookimpl(tryfirst=True)  # before the choice by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Many processes start in each test: on a busy machine that takes long."""
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(Path(__file__).parent):
            continue
        item.add_marker(pytest.mark.timeout(300))
        if item.get_closest_marker("push_suffices") and item.callspec.params["pipeline"] == "pull":
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[HAS_PASSED] = item.stash.get(HAS_PASSED, True) and report.passed
    return report


@pytest_asyncio.fixture(loop_scope="package")
async def stage(request: pytest.FixtureRequest, pipeline: Pipeline, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(pipeline, tmp_path) as own:
        before = asyncio.all_tasks()
        books = await invariants.open_books(pipeline)
        yield own
        if not request.node.stash[HAS_PASSED]:
            print_logs(tmp_path)
            await invariants.nobody_asks(before)
            with contextlib.suppress(AssertionError):  # the next test's workers would take what is left
                await own.nothing_pending()
            return
        await books.closed()
        await invariants.sockets_released(own)
        await own.drain()
        invariants.clean_logs(own)


@pytest.fixture
def ledger(pipeline: Pipeline) -> Ledger:
    return Ledger(pipeline.client)
