"""A request that no worker could ever hold is refused before it is queued."""

from __future__ import annotations

import pytest

from broker.base import WorkerRecord
from broker.membership import RegistryView
from gateway.context_limit import ContextLimit


def worker(role: str, *, blocks: int = 0, max_model_len: int = 0, state: str = "ready") -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{role}-{blocks}-{max_model_len}-{state}",
        role=role,
        state=state,
        endpoint="",
        model="m",
        fingerprint="",
        total_blocks=blocks,
        block_size=16,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize(
    ("workers", "limit"),
    [
        pytest.param([], 1000, id="nobody there: setting and model"),
        pytest.param([worker("prefill", blocks=8), worker("decode", blocks=20)], 128, id="smaller side"),
        pytest.param([worker("prefill", blocks=20), worker("decode", blocks=8)], 128, id="either side"),
        pytest.param([worker("decode", blocks=8), worker("decode", blocks=16)], 128, id="smallest of one side"),
        pytest.param([worker("decode", blocks=16, max_model_len=100)], 100, id="the engine's own limit"),
        pytest.param([worker("decode", blocks=10**6)], 1000, id="never above the model's"),
        pytest.param([worker("decode", blocks=16), worker("decode", blocks=8, state="draining")], 256, id="leaving"),
        pytest.param([worker("decode", blocks=16, state="draining")], 256, id="all leaving"),
        pytest.param([worker("decode"), worker("decode", blocks=16)], 256, id="one that says nothing"),
        pytest.param([worker("gateway")], 1000, id="gateways hold nothing"),
    ],
)
def test_the_limit_is_what_setting_model_and_the_smallest_worker_of_each_role_allow(
    workers: list[WorkerRecord], limit: int
) -> None:
    view = RegistryView()
    context_limit = ContextLimit(view, setting=0, of_model=1000)

    view.workers = tuple(workers)

    assert context_limit() == limit


def test_a_setting_lowers_the_limit_of_the_model() -> None:
    assert ContextLimit(RegistryView(), setting=500, of_model=1000)() == 500
