"""The gateway's estimate of a prefill follows what the prefill workers publish."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.membership import RegistryView
from gateway.estimates import PrefillEstimates


def worker(number: int, prefill_time: str, *, role: str = "prefill") -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"w{number}",
        role=role,
        state="ready",
        endpoint="",
        model="m",
        fingerprint="",
        prefill_time=prefill_time,
    )


def test_the_estimate_is_the_median_of_what_prefill_workers_say() -> None:
    view = RegistryView()
    estimate = PrefillEstimates(view)
    assert estimate(1000) == 0

    view.workers = (
        worker(1, "fixed_ms=1 token_ms=0.01 square_ms=0"),
        worker(2, ""),
        worker(3, "fixed_ms=3 token_ms=0.01 square_ms=0"),
        worker(4, "fixed_ms=900 token_ms=9 square_ms=0"),
        worker(5, "fixed_ms=900 token_ms=9 square_ms=0", role="decode"),
    )
    assert estimate(1000) == 13

    view.workers = (worker(1, "fixed_ms=1 token_ms=0.02 square_ms=0"),)
    assert estimate(1000) == 21
