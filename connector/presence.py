"""D's view of P ranks over time: who answered lately, and where their bytes are. Pure."""

from __future__ import annotations

from typing import Final

from connector.greetings import Peer

_FRESH_S: Final = 3.0
_MAX_PEERS: Final = 4096


class Presence:
    """A peer that answered a moment ago is read from at once; one that was silent has to show that it lives, by CLAIM.

    A read from a process that is stopped takes the transport's whole time-out, and no other read goes on meanwhile.
    """

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        """Per endpoint."""
        self._address_of: dict[Peer, str] = {}

    def heard(self, peer: Peer, now: float, transport_address: str = "") -> None:
        """It answered; `transport_address` if the answer names it."""
        if len(self._heard_at) + len(self._address_of) >= _MAX_PEERS:
            self._heard_at.clear()
            self._address_of.clear()
        self._heard_at[peer.endpoint] = now
        if transport_address:
            self._address_of[peer] = transport_address

    def lost(self, peer: Peer) -> None:
        """A read from it failed."""
        self._heard_at.pop(peer.endpoint, None)
        self._address_of.pop(peer, None)

    def fresh_address(self, peer: Peer, now: float) -> str | None:
        """Where to read from without asking; None: ask."""
        heard_at = self._heard_at.get(peer.endpoint)
        return None if heard_at is None or now - heard_at > _FRESH_S else self._address_of.get(peer)
