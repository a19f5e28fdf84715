"""Does a worker fit the workers that are there? Asked before it serves (`membership.py`). Pure: records come in.

A prefill and a decode worker fit when their fingerprints are equal, but for `tp`: then each may read the other's KV
blocks. Their tensor-parallel sizes need not be equal, but have to go together (`pdq.wire.tensor_parallel`).
Who judges a newcomer, first group that isn't empty:

1. the ready workers of the other role: those that it will exchange KV with
2. the ready workers of its own role: those that serve the same queue
3. the starting workers of the other role: two that start at once must not miss each other

It fits when it fits at least one of them. A mixed fleet is therefore possible (only workers that fit are paired), but a
worker that nobody could exchange KV with never takes a request. So workers with another dtype, block size or revision
don't replace a running fleet one by one: stop its other role first, or serve them under another model name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from broker.base import WorkerRecord
from pdq.wire.fingerprints import differing, number_in
from pdq.wire.tensor_parallel import shape_misfit

_OTHER_ROLE: Final = {"prefill": "decode", "decode": "prefill"}


def can_exchange(prefill: str, decode: str) -> bool:
    """May a decode worker of one fingerprint take KV of a prefill worker of the other one?"""
    return not (differing(prefill, decode, ignored=("tp",)) or _tp_misfit(prefill, decode))


def _difference(own: WorkerRecord, other: WorkerRecord) -> str:
    """What keeps them from working side by side, with both values; empty: nothing. One role may have several sizes."""
    found = [differing(own.fingerprint, other.fingerprint, other="there", ignored=("tp",))]
    if own.role != other.role:
        prefill, decode = (own, other) if own.role == "prefill" else (other, own)
        found.append(_tp_misfit(prefill.fingerprint, decode.fingerprint) or "")
    return "; ".join(filter(None, found))


def _tp_misfit(prefill: str, decode: str) -> str | None:
    return shape_misfit(number_in(prefill, "tp", 1), number_in(decode, "tp", 1), number_in(decode, "kv_heads", 0))


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
    ids_by_difference: dict[str, list[str]] = {}
    for worker in compared:
        difference = _difference(own, worker)
        ids_by_difference.setdefault(difference, []).append(worker.worker_id)
    if not compared or "" in ids_by_difference:
        return None
    found = [f"{_some(ids)}: {difference}" for difference, ids in ids_by_difference.items()]
    return (
        f"this {own.role} worker fits no {compared[0].role} worker of {own.model!r}, so no KV could be exchanged; "
        + " | ".join(found)
        + ". Start it with the same model, engine and KV settings, or under another --served-model-name"
    )


def _some(worker_ids: list[str]) -> str:
    more = f" and {len(worker_ids) - 3} more" if len(worker_ids) > 3 else ""
    return ", ".join(worker_ids[:3]) + more
