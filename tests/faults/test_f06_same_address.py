"""F6: a worker is killed, and another one, of a new epoch, comes up at its addresses."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger, Line
from tests.servers import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.push_suffices]
PROMPT = "0123456789" * 60


def _fixed_addresses() -> tuple[str, ...]:
    return ("--inbox-port", str(free_port()), "--side-channel-port", str(free_port()))


async def test_what_was_meant_for_a_dead_decode_worker_does_its_successor_no_harm(stage: Stage, ledger: Ledger) -> None:
    """One request streams, one is in transfer, and one is about to be offered to the old one's address."""
    addresses = _fixed_addresses()
    offer = {"pull": "before KvReady", "push": "before Reserve"}[stage.mode]
    prefill = await stage.spawn("prefill", stops_at=["half written", offer])
    old = await stage.spawn("decode", *addresses, "--sim-decode-ms", "40", stops_at=["half read"])
    await stage.serving(*stage.workers)
    await stage.ready()
    for worker in stage.workers:
        worker.let()
    asking: list[asyncio.Task[Line]] = []

    def ask(name: str) -> None:
        asking.append(asyncio.create_task(ledger.ask(f"{name} {PROMPT}", max_tokens=600, stream=True), name=name))

    ask("streams")
    await stage.streaming(ledger)
    in_transfer, point = {"pull": (old, "half read"), "push": (prefill, "half written")}[stage.mode]
    in_transfer.hold(point)
    ask("is in transfer")
    await in_transfer.reached(point)
    prefill.hold(offer)
    ask("is about to be offered")
    await prefill.reached(offer)

    await old.killed()  # its engine, too, which has one of the addresses
    await old.ended()
    new = await stage.start("decode", *addresses)
    prefill.let()

    assert new.worker_id != old.worker_id
    late = await stage.late(asking, RECOVERY_S)
    assert not late
    ledger.all_right()


async def test_what_was_meant_for_a_dead_prefill_worker_does_its_successor_no_harm(
    stage: Stage, ledger: Ledger
) -> None:
    """Its KV is in transfer; another request's prefill, of which only it knows, has just ended."""
    addresses = _fixed_addresses()
    decode = await stage.spawn("decode", stops_at=["half read"])
    old = await stage.spawn("prefill", *addresses, stops_at=["half written", "before settle"])
    await stage.serving(*stage.workers)
    await stage.ready()
    decode.let()
    old.let("half written")
    answered = await ledger.ask(f"was answered {PROMPT}")
    in_transfer, point = {"pull": (decode, "half read"), "push": (old, "half written")}[stage.mode]
    in_transfer.hold(point)
    asking = asyncio.create_task(ledger.ask(f"is in transfer {PROMPT}", max_tokens=100, stream=True), name="transfer")
    await in_transfer.reached(point)

    await old.killed()  # its engine, too, which has one of the addresses
    await old.ended()
    new = await stage.start("prefill", *addresses)
    decode.let()

    assert answered.is_right
    assert new.worker_id != old.worker_id
    late = await stage.late([asking], RECOVERY_S)
    assert not late
    ledger.all_right()
