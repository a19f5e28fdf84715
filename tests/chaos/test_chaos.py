"""Whatever happens, every client gets its own right answer, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.plan import Kind, strikes
from tests.chaos.report import as_text
from tests.chaos.run import Mode, redis_for_chaos, run

pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
"""Clients hang up at any moment, also while they connect: then httpx may leave a socket to the collector. What the
deployment's processes hold is judged by I4."""
SHORT_S = 60.0
LONG_S = float(os.environ.get("CHAOS_SECONDS", "120"))


async def survives(folder: Path, *, seed: int, mode: Mode, seconds: float) -> None:
    server = redis_for_chaos(folder)
    server.start()
    try:
        report = await run(folder, server, seed=seed, mode=mode, seconds=seconds)
    finally:
        server.kill()
    text = as_text(report)
    print(text)
    assert report.verdict.is_good, text


SHORT_SEEDS: dict[Mode, int] = {"push": 6179, "pull": 6842}
"""Between them their first storms have strikes of every kind."""


def test_the_short_storms_have_strikes_of_every_kind():
    assert {one.kind for seed in SHORT_SEEDS.values() for one in strikes(seed, SHORT_S)} == set(Kind)


@pytest.mark.parametrize(("mode", "seed"), SHORT_SEEDS.items())
@pytest.mark.timeout(SHORT_S + 600)
async def test_a_short_storm_is_survived(tmp_path: Path, mode: Mode, seed: int):
    await survives(tmp_path, seed=seed, mode=mode, seconds=SHORT_S)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.timeout(LONG_S + 600)
async def test_storms_of_many_seeds_are_survived(tmp_path: Path, seed: int, mode: Mode):
    await survives(tmp_path, seed=seed, mode=mode, seconds=LONG_S)
