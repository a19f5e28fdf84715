"""D's view of P ranks: greeted once per rank and epoch, and whether their KV memory fits ours. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from connector.asks import Asks
from connector.layout import KvRegion, LayoutError, check_fit
from connector.side_channel import Hello, Meta, Reject, Request
from connector.tp_plan import check_shares

_MAX_PEERS = 4096
"""Peers remembered; each restart of a P makes a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One rank of one life of a P engine."""

    endpoint: str
    epoch: str


class Greetings:
    """What HELLO brought, per peer. A refusal lasts as long as the peer's epoch."""

    def __init__(self, *, hello: Hello, regions: Sequence[KvRegion], every_s: float, tries: int) -> None:
        """`hello`: what to say, but for the peer's epoch."""
        self._hello = hello
        self._regions = regions
        self._metas: dict[Peer, Meta] = {}
        self._refusals: dict[Peer, str] = {}
        self._asks: Asks[Peer] = Asks(every_s=every_s, tries=tries)
        self._asked: set[Peer] = set()

    def meta(self, peer: Peer) -> Meta | None:
        return self._metas.get(peer)

    def refusal(self, peer: Peer) -> str | None:
        return self._refusals.get(peer)

    def greet(self, peer: Peer, now: float) -> None:
        """Once while the answer is open."""
        if peer in self._asked or peer in self._metas or peer in self._refusals:
            return
        self._asked.add(peer)
        self._asks.put(peer, peer.endpoint, replace(self._hello, epoch=peer.epoch), now)

    def answered(self, endpoint: str, answer: Meta | Reject) -> Peer | None:
        """The peer that is now known or refused; None when nobody asked it."""
        peer = Peer(endpoint=endpoint, epoch=answer.epoch)
        if peer not in self._asked:
            return None
        self._asked.discard(peer)
        self._asks.answered(peer)
        if len(self._metas) + len(self._refusals) >= _MAX_PEERS:
            self._metas.clear()
            self._refusals.clear()
        if isinstance(answer, Reject):
            self._refusals[peer] = answer.reason
            return peer
        try:
            check_fit(self._regions, answer.regions)
            check_shares(
                (self._hello.rank, self._hello.tp_size, self._hello.num_kv_heads, self._regions),
                (answer.rank, answer.tp_size, answer.num_kv_heads, answer.regions),
            )
        except LayoutError as exc:
            self._refusals[peer] = str(exc)
        else:
            self._metas[peer] = answer
        return peer

    def due(self, now: float) -> tuple[list[tuple[str, Request]], list[Peer]]:
        """Greetings to be sent, and peers that don't answer (they may be greeted again)."""
        sends, silent = self._asks.due(now)
        self._asked.difference_update(silent)
        return sends, silent

    def next_at(self) -> float | None:
        return self._asks.next_at()
