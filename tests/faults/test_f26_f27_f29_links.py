"""Links between processes. F26, F27: notices and their answers are lost, late, doubled and out of order.
F29: connections are half open: one end has lost them, the other one is not told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from pdq.wire.endpoints import tcp_endpoint
from tests.faults.conftest import ENVIRON, RECOVERY_S
from tests.faults.notice_proxy import NoticeProxy
from tests.faults.stage import Stage
from tests.faults.tcp_proxy import ADVERTISED, TcpProxy
from tests.faults.unreliable import SCENARIOS, Unreliable
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, shared
from tests.pipeline.ledger import Ledger
from tests.servers import free_port

pytestmark = pytest.mark.asyncio(loop_scope="package")
DECODE_S = 0.03
SLOW = ("--sim-decode-ms", str(DECODE_S * 1000))
ANSWERED_S = 40.0
NUM_STREAMED = 200


@pytest_asyncio.fixture(scope="module", loop_scope="package", params=["pull", "push"])
async def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    environ = {**ENVIRON, "PDQ_GATEWAY__ADVERTISE_HOST": ADVERTISED}
    folder = tmp_path_factory.mktemp(request.param)
    async with shared(folder, prefill=0, decode=0, mode=request.param, environ=environ) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="package")
async def gateway_port(pipeline: Pipeline) -> int:
    """Of the gateway's inbox, which others look for at ADVERTISED."""
    (gateway,) = (record for record in (await pipeline.workers()).values() if record["role"] == "gateway")
    return int(gateway["endpoint"].rpartition(":")[2])


@pytest.fixture
def gateway_link(gateway_port: int) -> Iterator[TcpProxy]:
    with TcpProxy(("127.0.0.1", gateway_port), host=ADVERTISED, port=gateway_port) as proxy:
        yield proxy


@pytest.fixture
def decode_link() -> Iterator[TcpProxy]:
    """In front of a decode worker's inbox."""
    port = free_port()
    with TcpProxy(("127.0.0.1", port), host=ADVERTISED, port=port) as proxy:
        yield proxy


async def test_notices_that_are_lost_late_doubled_or_out_of_order_cost_nobody_an_answer_and_double_none(
    stage: Stage, ledger: Ledger, gateway_port: int
) -> None:
    network = Unreliable(seed=1)
    ports = [free_port() for _ in range(2)]
    with contextlib.ExitStack() as proxies:
        for port in (gateway_port, *ports):
            proxies.enter_context(
                NoticeProxy(tcp_endpoint("127.0.0.1", port), host=ADVERTISED, port=port, fate=network.fate)
            )
        await stage.spawn("prefill")
        for port in ports:
            await stage.spawn("decode", "--inbox-port", str(port), "--advertise-host", ADVERTISED)
        await stage.serving(*stage.workers)
        await stage.ready()
        asking = [
            asyncio.create_task(ledger.ask(f"{name} {stream} " * 9, stream=stream, max_tokens=12), name=name)
            for name in SCENARIOS
            for stream in (True, False)
        ]
        late = await stage.late(asking, ANSWERED_S)
        assert not late

        network.is_random = True
        prompts = [f"{number} whatever happens " * 9 for number in range(30)]
        asking = [
            asyncio.create_task(ledger.ask(prompt, stream=number % 2 == 0, max_tokens=12), name=prompt)
            for number, prompt in enumerate(prompts)
        ]
        late = await stage.late(asking, ANSWERED_S)
        network.is_random = False
        assert not late
        await stage.pipeline.quiet()

    ledger.all_right()
    assert set(network.scenario_of.values()) >= set(SCENARIOS)
    assert all(len(workers) == 1 for workers in network.workers.values()), "one pair, one decode worker with Go"


async def test_a_decode_worker_whose_link_to_the_gateway_is_half_open_repeats_its_tokens_over_another(
    gateway_link: TcpProxy, stage: Stage, ledger: Ledger
) -> None:
    await asyncio.gather(stage.start("prefill"), stage.start("decode", *SLOW))
    await stage.ready()
    asking = [
        asyncio.create_task(ledger.ask(f"{number} streams " * 40, max_tokens=NUM_STREAMED, stream=True))
        for number in range(6)
    ]
    await stage.streaming(ledger)

    gateway_link.half_open()
    late = await stage.late(asking, RECOVERY_S + NUM_STREAMED * DECODE_S)

    assert not late
    ledger.all_right()

    async def unheard() -> str:
        return "" if process_logs.events(stage.log_dir, "link_silent", "decode-1") else "it has noticed nothing"

    await eventually(unheard, limit_s=40, what="word of the silent link")


async def test_a_decode_worker_that_others_reach_by_half_open_links_is_asked_over_others(
    gateway_link: TcpProxy, decode_link: TcpProxy, stage: Stage, ledger: Ledger
) -> None:
    listens = ("--inbox-port", str(decode_link.port), "--advertise-host", decode_link.host)
    await asyncio.gather(stage.start("prefill"), stage.start("decode", *SLOW, *listens))
    await stage.ready()
    await ledger.ask("both ask it something " * 20, max_tokens=1)
    asking = asyncio.create_task(
        Ledger(stage.pipeline.client).ask("is left alone " * 150, max_tokens=2000, stream=True)
    )
    await _decoding(stage, 1)

    decode_link.half_open()
    late = await stage.late([asyncio.create_task(ledger.ask("comes after " * 40))], RECOVERY_S)
    decode_link.half_open()
    asking.cancel()

    assert not late
    ledger.all_right()
    await stage.pipeline.quiet(limit_s=40)  # a minute before it would have ended by itself


async def _decoding(stage: Stage, count: int) -> None:
    """Waits until so many requests are with a decode worker."""

    async def too_few() -> str:
        records = await stage.pipeline.workers()
        running = sum(int(record["running"]) for record in records.values() if record["role"] == "decode")
        return "" if running >= count else f"{running} run"

    await eventually(too_few, limit_s=60, what="decoding")
