"""Can a request be served now? Reasons are stable words for machines; /ready turns them into 200 or 503."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.fit import can_exchange
from broker.membership import RegistryView


def reasons_not_ready(view: RegistryView, *, is_open: bool, needs_prefill: bool = True) -> list[str]:
    """Empty: ready. `needs_prefill`: not in local mode.

    The view is at most one heartbeat old while the registry answers."""
    if not is_open:
        return ["draining"]
    if not view.is_current:
        return ["queue_unavailable"]
    reasons = []
    prefill, decode = (
        [worker for worker in view.of_role(role) if worker.state == "ready"] for role in ("prefill", "decode")
    )
    if not prefill and needs_prefill:
        reasons.append("no_prefill_worker")
    if not decode:
        reasons.append("no_decode_worker")
    if prefill and decode and not any(can_exchange(p, d) for p in _kinds(prefill) for d in _kinds(decode)):
        reasons.append("fingerprint_mismatch")
    return reasons


def _kinds(workers: list[WorkerRecord]) -> set[str]:
    return {worker.fingerprint for worker in workers}
