"""F28: KV transfers fail half-way, again and again, stand still, or are said to have failed; the writer or the one that
is read from sleeps in mid batch, past every time-out, and wakes up when others have the blocks.
F29: the data's own connection is cut in mid batch, while the side channel lives.

The simulated engine's bytes are the witness: a wrong one changes an answer.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.stage import Stage, Worker
from tests.pipeline import process_logs
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger, text_of

pytestmark = pytest.mark.asyncio(loop_scope="package")

TRANSPORT_S = 5.0
"""The transport's whole time-out, which can't be set shorter."""
STALL_S = 1.2
"""Longer than a call may take that is worth a second try."""
ALL_ANEW = ("--no-prefix-caching",)
FATES = {
    "once": ("fail",),
    "though it has not": ("deny",),
    "again and again": ("fail", "fail", "fail"),
    "after it stood still": ("stall",),
    "cut off": ("cut",),
}
"""What becomes of the first calls of a request's transfer that are met half-way; all later ones are right."""


def half_way(stage: Stage, prefill: Worker, decode: Worker) -> tuple[Worker, str]:
    """Who moves the bytes, and where it stands."""
    return {"pull": (decode, "half read"), "push": (prefill, "half written")}[stage.mode]


def fences(stage: Stage) -> int:
    return len(process_logs.events(stage.log_dir, "kv_transport_fenced"))


async def test_kv_transfers_that_fail_in_every_way_cost_nobody_an_answer(stage: Stage, ledger: Ledger) -> None:
    prefill = await stage.spawn("prefill", *ALL_ANEW, stops_at=["half written"])
    decode = await stage.spawn("decode", *ALL_ANEW, stops_at=["half read"])
    mover, point = half_way(stage, prefill, decode)
    await stage.serving(prefill, decode)
    await stage.ready()
    for name, words in FATES.items():
        num_fences = fences(stage)
        mover.hold(point)
        asking = asyncio.create_task(ledger.ask(text_of(8000, random.Random(name)), max_tokens=20, stream=True))
        for word in words:
            stop = await mover.reached(point)
            if word == "stall":
                await asyncio.sleep(STALL_S)
            mover.go(stop, "fail" if word == "stall" else word)
        mover.let()
        late = await stage.late([asking], RECOVERY_S + 10.0)
        assert not late, name
        assert fences(stage) > num_fences, f"{name}: it went on without a fence"
        print(
            name,
            [
                e.get("cause")
                for e in process_logs.events(stage.log_dir, "kv_read_repeated")
                + process_logs.events(stage.log_dir, "kv_push_repeated")
            ],
        )
    ledger.all_right()


async def test_who_sleeps_in_mid_transfer_writes_no_byte_into_blocks_that_others_have_when_it_wakes_up(
    stage: Stage, ledger: Ledger
) -> None:
    stage.allowed_faults = ("engine_stalled",)  # so it looks to who wakes up
    sleeper = await stage.spawn("prefill", *ALL_ANEW, stops_at=["half written"])
    other = await stage.spawn("prefill", *ALL_ANEW, stops_at=["before take"])
    decode = await stage.spawn(
        "decode", *ALL_ANEW, "--num-blocks", "96", "--sim-decode-ms", "10", stops_at=["half read"]
    )
    await stage.serving(sleeper, other, decode)
    await stage.ready()
    rng = random.Random(28)
    mover, point = half_way(stage, sleeper, decode)
    asking = asyncio.create_task(ledger.ask(text_of(1200, rng), max_tokens=30), name="in mid transfer")
    await mover.reached(point)

    sleeper.suspend()
    mover.let()
    other.let()
    late = await stage.late([asking], RECOVERY_S + TRANSPORT_S + 20.0)
    assert not late
    growing = Ledger(ledger.client)
    others = [asyncio.create_task(growing.ask(text_of(400, rng), max_tokens=350, stream=True)) for _ in range(2)]

    async def too_short() -> str:
        seen = [len(line.text) for line in growing.lines]
        return "" if len(seen) == 2 and min(seen) > 200 else f"{seen} tokens"

    await eventually(too_short, limit_s=40, what="requests in all the blocks")
    sleeper.resume()
    await asyncio.gather(*others)

    growing.all_right()
    await stage.pipeline.quiet()
    await asyncio.gather(*(ledger.ask(f"{number} afterwards {text_of(200, rng)}") for number in range(10)))
    ledger.all_right()
    assert process_logs.events(stage.log_dir, "kv_transport_fenced", decode.name)
