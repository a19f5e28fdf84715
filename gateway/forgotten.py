"""Requests that their decode worker has forgotten: it lists what it has open, and this one is missing twice. Pure.

Frames come in order, so whatever the worker said of a request before a list is known when the list comes; only Failed
goes another way, and has the time between two lists to arrive. A list that is older than the request's Admit (they
travel on different connections) says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from broker.messages import Deltas
from gateway.exchange import Exchange
from pdq.wire.types import Pair


def take_list(exchanges: Iterable[Exchange], frame: Deltas) -> list[tuple[Exchange, Pair]]:
    """Those that are missing for the second time, with the pair that has Go; the first time is remembered.

    `frame`: one with a worker's list.
    """
    open_ids = frozenset(frame.owes or ())
    missing = []
    for exchange in exchanges:
        owner, admit = exchange.session.owner, exchange.admit
        if owner is None or owner.worker != frame.worker or admit is None or not 0 < admit.frame <= frame.frame:
            continue
        if exchange.request_id in open_ids:
            exchange.is_unlisted = False
        elif exchange.is_unlisted:
            missing.append((exchange, owner.pair))
        else:
            exchange.is_unlisted = True
    return missing
