"""Which pairs of tensor-parallel sizes can exchange KV. Pure; asked at start-up, and again per transfer."""

from __future__ import annotations


def shape_misfit(prefill_tp: int, decode_tp: int, num_kv_heads: int = 0) -> str | None:
    """Why these two can't exchange KV, with both values; None: they can.

    With equal sizes rank r holds the same on both sides. Else each rank of D is served by prefill_tp / decode_tp ranks
    of P of its own, so that P's size has to be a multiple of D's. Heads must be spread evenly over the ranks of each
    side, or ranks evenly over the heads. `num_kv_heads`: of the whole model, 1 for MLA; 0: not known.
    """
    if min(prefill_tp, decode_tp) < 1:
        return f"prefill has TP {prefill_tp}, decode TP {decode_tp}: both must be at least 1"
    if prefill_tp % decode_tp:
        return f"prefill has TP {prefill_tp}, decode TP {decode_tp}: equal sizes, or prefill's a multiple of decode's"
    if not num_kv_heads:
        return None
    for role, tp_size in (("prefill", prefill_tp), ("decode", decode_tp)):
        if num_kv_heads % tp_size and tp_size % num_kv_heads:
            return (
                f"prefill has TP {prefill_tp}, decode TP {decode_tp}: {num_kv_heads} KV heads neither divide {role}'s"
                f" {tp_size} ranks nor are divided by them"
            )
    return None
