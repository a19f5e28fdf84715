"""Which workers are asked after one of them gave no answer."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.silence import Silence


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, role="decode", state="ready", endpoint="", model="", fingerprint="")


WORKERS = (record("a"), record("b"))


def test_who_was_silent_is_left_out_for_a_while():
    silence = Silence(3.0)

    silence.note("a", now=10.0)

    assert silence.heard_of(WORKERS, now=12.9) == [WORKERS[1]]
    assert silence.heard_of(WORKERS, now=13.0) == list(WORKERS)


def test_when_all_were_silent_all_are_asked():
    silence = Silence(3.0)

    for worker in WORKERS:
        silence.note(worker.worker_id, now=10.0)

    assert silence.heard_of(WORKERS, now=10.0) == list(WORKERS)
