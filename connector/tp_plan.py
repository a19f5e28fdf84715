"""Which ranks of P serve which ranks of D, and with which heads. Pure: both sides compute the same from equal values.

Rank r of t ranks holds heads [r*H/t, (r+1)*H/t) of H KV heads; with t > H the one head r*H//t, as t/H replicas do. MLA
is H = 1: one latent "head" that every rank holds.

With P_tp = n * D_tp, rank d of D is served by the n ranks d*n .. d*n + n - 1 of P alone, whatever H is: their heads
together are just d's. So each rank of P has one rank of D that its blocks are for. Where several of the n hold the same
head, one of them is the source, chosen by the transfer id so that the load is spread; the others are *spares*: nothing
is read from them, they are told so, and free their blocks when the transfer has ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from connector.layout import KvRegion, LayoutError
from pdq.wire.tensor_parallel import shape_misfit


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The P ranks that one D rank deals with."""

    sources: tuple[int, ...]
    """Each byte of D's share is at exactly one of them."""
    spares: tuple[int, ...] = ()
    """Hold what a source holds too."""


def heads_of(rank: int, tp_size: int, num_kv_heads: int) -> tuple[int, int]:
    """(first head, number of heads) that this rank holds."""
    if num_kv_heads >= tp_size:
        share = num_kv_heads // tp_size
        return rank * share, share
    return rank * num_kv_heads // tp_size, 1


def servers_of(decode_rank: int, decode_tp: int, prefill_tp: int, num_kv_heads: int, transfer_id: str) -> Servers:
    """Whom D's rank reads this transfer from, or is written by. `num_kv_heads` 0: not known, equal TP only.

    Raises LayoutError for a shape that isn't legal, with both values.
    """
    if misfit := shape_misfit(prefill_tp, decode_tp, num_kv_heads):
        raise LayoutError(misfit)
    if prefill_tp == decode_tp:
        return Servers(sources=(decode_rank,))
    if not num_kv_heads:
        raise LayoutError(
            f"prefill has TP {prefill_tp}, decode TP {decode_tp}: this rank doesn't know the model's number of KV heads"
        )
    size = prefill_tp // decode_tp
    group = range(decode_rank * size, (decode_rank + 1) * size)
    num_wanted = heads_of(decode_rank, decode_tp, num_kv_heads)[1]
    num_each = heads_of(group[0], prefill_tp, num_kv_heads)[1]
    num_replicas = size * num_each // num_wanted
    chosen = zlib.crc32(transfer_id.encode()) % num_replicas
    sources = tuple(group[chosen::num_replicas])
    return Servers(sources=sources, spares=tuple(rank for rank in group if rank not in sources))


def consumer_of(prefill_rank: int, prefill_tp: int, decode_tp: int) -> int:
    """The only D rank that needs P's rank's blocks: once it is done they are free. Raises LayoutError."""
    if misfit := shape_misfit(prefill_tp, decode_tp):
        raise LayoutError(misfit)
    return prefill_rank // (prefill_tp // decode_tp)


def check_shares(
    local: tuple[int, int, int, Sequence[KvRegion]], remote: tuple[int, int, int, Sequence[KvRegion]]
) -> None:
    """Both are (rank, TP size, KV heads of the model, regions). Raises LayoutError unless the plan holds for them.

    Equal TP: the same heads on both sides. Else each region has to hold the very heads that its rank should.
    """
    (_, tp_size, num_kv_heads, regions), (_, peer_tp_size, peer_num_kv_heads, peer_regions) = local, remote
    if tp_size == peer_tp_size:
        there = {region.layer: region for region in peer_regions}
        for mine in regions:
            theirs = there[mine.layer]
            if (mine.first_head, mine.num_heads) != (theirs.first_head, theirs.num_heads):
                raise LayoutError(
                    f"{mine.layer}: heads {mine.first_head}+{mine.num_heads} here,"
                    f" {theirs.first_head}+{theirs.num_heads} at the peer, but TP {tp_size} on both sides"
                )
        return
    if num_kv_heads != peer_num_kv_heads or not num_kv_heads:
        raise LayoutError(
            f"TP {tp_size} here, {peer_tp_size} at the peer: KV heads of the model must be known and equal,"
            f" but are {num_kv_heads} here, {peer_num_kv_heads} at the peer (0: not said)"
        )
    for where, (rank, size, _, held) in (("here", local), ("at the peer", remote)):
        first, count = heads_of(rank, size, num_kv_heads)
        for region in held:
            if (region.first_head, region.num_heads) != (first, count):
                raise LayoutError(
                    f"{region.layer}: rank {rank} of {size} {where} should hold heads {first}+{count}"
                    f" of {num_kv_heads}, but holds {region.first_head}+{region.num_heads}"
                )
