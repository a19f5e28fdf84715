"""When a decode worker counts as dead."""

from __future__ import annotations

import pytest

from gateway.owner_watch import Debt, Pulse, Verdict, judge
from gateway.settings import GatewaySettings

SETTINGS = GatewaySettings(stall_s=10, owner_kv_wait_s=40, owner_silence_s=2.5)


def debt(admitted_at: float = 0.0, token_at: float | None = None) -> Debt:
    return Debt(endpoint="tcp://d", admitted_at=admitted_at, token_at=token_at)


@pytest.mark.parametrize(
    ("owed", "pulse", "now", "verdict"),
    [
        (debt(token_at=100), Pulse(frame_at=100, step_at=100), 101, Verdict.ALIVE),
        (debt(token_at=100), Pulse(frame_at=100, step_at=100), 103, Verdict.SUSPECT),
        (debt(token_at=100), Pulse(frame_at=110, step_at=100), 109, Verdict.ALIVE),
        (debt(token_at=100), Pulse(frame_at=110, step_at=100), 111, Verdict.DEAD),
        (debt(), Pulse(frame_at=30, step_at=0), 31, Verdict.ALIVE),
        (debt(), Pulse(frame_at=41, step_at=0), 41, Verdict.DEAD),
        (debt(admitted_at=100), None, 101, Verdict.ALIVE),
        (debt(admitted_at=100), None, 103, Verdict.SUSPECT),
        (debt(admitted_at=100), Pulse(frame_at=1, step_at=1), 101, Verdict.ALIVE),
    ],
    ids=[
        "tokens flow",
        "silent for a while: ask",
        "frames come, steps may still",
        "frames come, no step while it owes tokens",
        "no step while the KV may be on its way",
        "no step for longer than any KV takes",
        "just admitted, no frame yet",
        "admitted, no frame for a while",
        "idle before it was admitted",
    ],
)
def test_a_worker_is_dead_only_when_it_owes_and_does_nothing(owed, pulse, now, verdict):
    assert judge(owed, pulse, now, SETTINGS) is verdict
