"""Does a worker fit the workers that are there? Asked before it serves (`membership.py`). Pure: records come in.

A prefill and a decode worker fit when their fingerprints are equal: then each may read the other's KV blocks.
Who judges a newcomer, first group that isn't empty:

1. the ready workers of the other role: those that it will exchange KV with
2. the ready workers of its own role: those that serve the same queue
3. the starting workers of the other role: two that start at once must not miss each other

It fits when it equals at least one of them. A mixed fleet is therefore possible (placement pairs equals only), but a
worker that nobody could exchange KV with never takes a request. So workers with another dtype, block size or revision
don't replace a running fleet one by one: stop its other role first, or serve them under another model name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from broker.base import WorkerRecord
from pdq.wire.fingerprints import differing

_OTHER_ROLE: Final = {"prefill": "decode", "decode": "prefill"}


def fits(one: WorkerRecord, other: WorkerRecord) -> bool:
    """May they exchange KV?"""
    return one.fingerprint == other.fingerprint


def judges(own: WorkerRecord, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
    """The workers that `own` is compared with. Empty for a gateway, and for the first worker of a model."""
    other_role = _OTHER_ROLE.get(own.role)
    others = [worker for worker in workers if worker.worker_id != own.worker_id]
    for role, state in ((other_role, "ready"), (own.role, "ready"), (other_role, "starting")):
        found = [worker for worker in others if worker.role == role and worker.state == state]
        if other_role is not None and found:
            return found
    return []


def misfit(own: WorkerRecord, workers: Iterable[WorkerRecord]) -> str | None:
    """Why `own` must not serve: who is there, and the differing values of both sides. None: it fits."""
    compared = judges(own, workers)
    if not compared or any(fits(own, worker) for worker in compared):
        return None
    ids_by_difference: dict[str, list[str]] = {}
    for worker in compared:
        difference = differing(own.fingerprint, worker.fingerprint, other="there")
        ids_by_difference.setdefault(difference, []).append(worker.worker_id)
    found = [f"{_some(ids)}: {difference}" for difference, ids in ids_by_difference.items()]
    return (
        f"this {own.role} worker fits no {compared[0].role} worker of {own.model!r}, so no KV could be exchanged; "
        + " | ".join(found)
        + ". Start it with the same model, engine and KV settings, or under another --served-model-name"
    )


def _some(worker_ids: list[str]) -> str:
    more = f" and {len(worker_ids) - 3} more" if len(worker_ids) > 3 else ""
    return ", ".join(worker_ids[:3]) + more
