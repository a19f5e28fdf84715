"""Messages between the connectors of P and D, and their codec. Each rank listens.

Pull: D's halves ask P's rank.

    D -> P                       P -> D
    Hello   once per rank+epoch  Meta | Reject          who are you, where are your regions, do we fit
    Renew   every lease/3        Renewed | Gone         D's scheduler half until CLAIM, then each worker half
    Claim   per rank             Claimed | Gone         from here on this rank reads
    Verify  after the read       Verified | Gone        the blocks were pinned all the time; may be the Done(ok) too
    Done    ok/failed/cancelled  DoneAck                repeated until acknowledged
                                 Abort                  P is going: stop reading

Push: D's scheduler half tells P's ranks where its blocks are; P's rank asks D's rank whether it may write.

    D -> P                       P -> D
    RecvReady every lease/3      RecvNoted | Gone       blocks exist; also D's sign of life, and P's when answered
    Cancel                       Cancelled              D wants no (more) writes; answered when P's calls have ended
    P -> D                       D -> P
    Hello                        Meta | Reject          as above, with the sides swapped
    Open                         Opened | Gone          from here on this P rank writes to that transport address
    PushDone, PushFail           PushAck                repeated until acknowledged; nothing is written after it

`epoch` is the listener's, `consumer` D's own one, `producer` P's own one. An answer repeats the epoch that was asked
for. All are idempotent: what is not answered in time is sent again.
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
    """Readable `key=value` pairs of all that must be equal on both sides; `tp` may differ, see `tp_plan`."""
    num_kv_heads: int = 0
    """Of the whole model, 1 for MLA; 0: not said, so that TP must be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    epoch: str
    rank: int
    tp_size: int
    regions: tuple[KvRegion, ...]
    transport_address: str
    """Where to read from now."""
    num_kv_heads: int = 0
    """As in Hello."""


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
    load: int
    """Counts the rank's loads: a later one of the same transfer has read at another time."""
    is_last: bool
    """True: this rank is done once it is told Verified, no Done follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(TransferMessage):
    transport_address: str
    """What was read came from here, or it may be another's bytes."""
    load: int | None = None
    """As in Verify: an answer that comes once more says nothing of a later load. None: by a P of a former version."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvReady(TransferMessage):
    """D's blocks exist: entry i of `block_ids` takes block `first_block + i` of the prompt."""

    consumer: str
    host: str
    port: int
    """Where D's rank 0 listens; rank r on port + r."""
    tp_size: int
    block_size: int
    num_tokens: int
    first_block: int
    """Blocks before it D has already."""
    block_ids: bytes
    """`pack_ids`. Empty: D has all it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvNoted(TransferMessage):
    """P is alive, and keeps it even if it doesn't know the prefill yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(TransferMessage):
    consumer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(TransferMessage):
    """This P rank writes no more for the transfer."""

    is_drained: bool
    """False: some call of it failed; its bytes may still arrive, until D's fence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(TransferMessage):
    producer: str
    rank: int
    tp_size: int
    broken_generation: int | None = None
    """Not None: a write to the transport of this generation failed; D fences before it answers, if it hasn't yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(TransferMessage):
    transport_address: str
    transport_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDone(TransferMessage):
    """All blocks of all layers of these tokens are in D's memory."""

    producer: str
    rank: int
    num_tokens: int
    num_bytes: int
    num_descriptors: int
    seconds: float
    """Time in transport calls."""
    hidden_seconds: float
    """... of which before the prefill's end."""
    is_spare: bool = False
    """This rank wrote nothing, since another one with the same heads does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFail(TransferMessage):
    producer: str
    rank: int
    reason: str
    is_drained: bool
    """As in Cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAck(TransferMessage):
    pass


PullRequest = Hello | Renew | Claim | Verify | Done
"""Hello belongs to both."""
PushRequest = RecvReady | Cancel | Open | PushDone | PushFail
Request = PullRequest | PushRequest
PushAnswer = RecvNoted | Cancelled | Opened | PushAck
Answer = Meta | Reject | Renewed | Claimed | Verified | DoneAck | Gone | Abort | PushAnswer
SideMessage = Request | Answer


def codec() -> Codec[SideMessage]:
    """Made once per half."""
    return Codec(SideMessage)


def endpoint_of(host: str, port: int) -> str:
    """`tcp://host:port`; IPv6 addresses in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
