"""Messages between the connectors of P and D, and their codec. Each P rank listens, D's halves ask.

    D -> P                       P -> D
    Hello   once per rank+epoch  Meta | Reject          who are you, where are your regions, do we fit
    Renew   every lease/3        Renewed | Gone         D's scheduler half until CLAIM, then each worker half
    Claim   per rank             Claimed | Gone         from here on this rank reads
    Verify  after the read       Verified | Gone        the blocks were pinned all the time; may be the Done(ok) too
    Done    ok/failed/cancelled  DoneAck                repeated until acknowledged
                                 Abort                  P is going: stop reading

`epoch` is always P's: the one that D's ticket names, or P's own in an answer. `consumer` is D's epoch. All are
idempotent: what is not answered in time is sent again. Push will add RecvReady, PushDone and PushFail here.
"""

from __future__ import annotations

from dataclasses import dataclass

from connector.layout import KvRegion
from connector.transfers import Outcome, TransferKey
from pdq.wire.codec import Codec
from pdq.wire.types import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    epoch: str
    consumer: str
    rank: int
    tp_size: int
    fingerprint: str
    """Readable `key=value` pairs of all that must be equal on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    epoch: str
    rank: int
    tp_size: int
    regions: tuple[KvRegion, ...]
    transport_address: str
    """Where to read from now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    epoch: str
    """The one that Hello named, also when it isn't P's."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMessage:
    epoch: str
    transfer_id: str
    pair: Pair

    @property
    def key(self) -> TransferKey:
        return TransferKey(transfer_id=self.transfer_id, pair=self.pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(TransferMessage):
    consumer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed(TransferMessage):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(TransferMessage):
    consumer: str
    rank: int
    tp_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(TransferMessage):
    lease_s: float
    transport_address: str
    """Where to read from now; a fence of P changes it."""
    transport_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify(TransferMessage):
    consumer: str
    rank: int
    tp_size: int
    is_last: bool
    """True: this rank is done once it is told Verified, no Done follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(TransferMessage):
    transport_address: str
    """What was read came from here, or it may be another's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(TransferMessage):
    consumer: str
    rank: int | None
    """None: all ranks of this consumer; from its scheduler half, when no rank will ever claim."""
    tp_size: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneAck(TransferMessage):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(TransferMessage):
    """These blocks are not, or no longer, to be read. Final for this (transfer, pair)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(TransferMessage):
    reason: str


Request = Hello | Renew | Claim | Verify | Done
Answer = Meta | Reject | Renewed | Claimed | Verified | DoneAck | Gone | Abort
SideMessage = Request | Answer


def codec() -> Codec[SideMessage]:
    """Made once per half."""
    return Codec(SideMessage)


def endpoint_of(host: str, port: int) -> str:
    """`tcp://host:port`; IPv6 addresses in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
