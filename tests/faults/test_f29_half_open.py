"""F29: half-open connections between processes: one end has lost them, the other is not told. Each link in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.faults.conftest import ENVIRON, RECOVERY_S
from tests.faults.stage import Stage
from tests.faults.tcp_proxy import ADVERTISED, TcpProxy
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, shared
from tests.pipeline.ledger import Ledger
from tests.servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="package")
SLOW = ("--sim-decode-ms", "30")


@pytest_asyncio.fixture(scope="module", loop_scope="package", params=["pull", "push"])
async def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    environ = {**ENVIRON, "PDQ_GATEWAY__ADVERTISE_HOST": ADVERTISED}
    folder = tmp_path_factory.mktemp(request.param)
    async with shared(folder, prefill=0, decode=0, mode=request.param, environ=environ) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="package")
async def gateway_link(pipeline: Pipeline) -> AsyncIterator[TcpProxy]:
    """In front of the gateway's inbox."""
    (gateway,) = (record for record in (await pipeline.workers()).values() if record["role"] == "gateway")
    port = int(gateway["endpoint"].rpartition(":")[2])
    with TcpProxy(("127.0.0.1", port), host=ADVERTISED, port=port) as proxy:
        yield proxy


@pytest.fixture
def decode_link() -> Iterator[TcpProxy]:
    """In front of a decode worker's inbox."""
    port = free_port()
    with TcpProxy(("127.0.0.1", port), host=ADVERTISED, port=port) as proxy:
        yield proxy


async def test_a_decode_worker_whose_link_to_the_gateway_is_half_open_repeats_its_tokens_over_another(
    stage: Stage, ledger: Ledger, gateway_link: TcpProxy
) -> None:
    await asyncio.gather(stage.start("prefill"), stage.start("decode", *SLOW))
    await stage.ready()
    asking = [
        asyncio.create_task(ledger.ask(f"{number} streams " * 40, max_tokens=100, stream=True)) for number in range(6)
    ]
    await stage.streaming(ledger)

    gateway_link.half_open()
    late = await stage.late(asking, RECOVERY_S)

    assert not late
    ledger.all_right()
    assert process_logs.events(stage.log_dir, "link_silent", "decode-1")


async def test_a_decode_worker_that_others_reach_by_half_open_links_is_asked_over_others(
    stage: Stage, ledger: Ledger, gateway_link: TcpProxy, decode_link: TcpProxy
) -> None:
    listens = ("--inbox-port", str(decode_link.port), "--advertise-host", decode_link.host)
    await asyncio.gather(stage.start("prefill"), stage.start("decode", *SLOW, *listens))
    await stage.ready()
    await ledger.ask("both ask it something " * 20, max_tokens=1)
    asking = asyncio.create_task(Ledger(stage.pipeline.client).ask("is left alone " * 40, max_tokens=560, stream=True))
    await _decoding(stage, 1)

    decode_link.half_open()
    late = await stage.late([asyncio.create_task(ledger.ask("comes after " * 40))], RECOVERY_S)
    decode_link.half_open()
    asking.cancel()

    assert not late
    ledger.all_right()
    await stage.pipeline.quiet(limit_s=RECOVERY_S)


async def _decoding(stage: Stage, count: int) -> None:
    """Waits until so many requests are with a decode worker."""

    async def too_few() -> str:
        records = await stage.pipeline.workers()
        running = sum(int(record["running"]) for record in records.values() if record["role"] == "decode")
        return "" if running >= count else f"{running} run"

    await eventually(too_few, limit_s=20, what="decoding")
