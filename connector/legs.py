"""What a load is made of, what its core wants done, and the messages it sends. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from connector.greetings import Peer
from connector.layout import Runs
from connector.side_channel import Claim, Done, Hello, Renew, Request, Verify, endpoint_of
from connector.step import Load
from connector.transfers import LegState, Outcome, TransferKey
from pdq.wire.types import KvTicket, TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    endpoint: str
    message: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRead:
    """Ends with one of `read`, `drained`, or `broken` and then `fenced`."""

    leg_id: int
    address: str
    runs: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRead:
    leg_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """No peer and no call of ours touches the load's blocks any more."""

    load: Load
    outcome: Outcome
    reason: str
    stats: TransferStats


Action = Send | StartRead | StopRead | Report


@dataclass(slots=True, kw_only=True, eq=False)
class Leg:
    leg_id: int
    running: Running
    peer: Peer
    state: LegState = LegState.GREETING
    is_gone: bool = False
    """P said so: it needs no Done."""
    is_done_told: bool = False
    """Its Verify was its Done."""
    address: str = ""
    """Of P's transport, that it is read from."""
    num_bytes: int = 0
    num_descriptors: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    load: Load
    key: TransferKey
    started_at: float
    deadline: float
    renew_at: float
    legs: list[Leg] = field(default_factory=list)
    spares: list[Peer] = field(default_factory=list)
    """P's ranks whose blocks are kept for this load, but not read: another rank has the same heads."""
    outcome: Outcome | None = None
    reason: str = ""


def peer_of(ticket: KvTicket, rank: int) -> Peer:
    return Peer(endpoint=endpoint_of(ticket.host, ticket.port + rank), epoch=ticket.epoch)


def claim_of(leg: Leg, hello: Hello) -> Claim:
    key = leg.running.key
    return Claim(
        epoch=leg.peer.epoch,
        transfer_id=key.transfer_id,
        pair=key.pair,
        consumer=hello.consumer,
        rank=hello.rank,
        tp_size=hello.tp_size,
    )


def renew_of(running: Running, peer: Peer, hello: Hello) -> Renew:
    key = running.key
    return Renew(epoch=peer.epoch, transfer_id=key.transfer_id, pair=key.pair, consumer=hello.consumer)


def verify_of(leg: Leg, hello: Hello) -> Verify:
    """The only leg of a load is done when it is verified; of several, one that failed may still need the others."""
    key = leg.running.key
    return Verify(
        epoch=leg.peer.epoch,
        transfer_id=key.transfer_id,
        pair=key.pair,
        consumer=hello.consumer,
        rank=hello.rank,
        tp_size=hello.tp_size,
        load=leg.leg_id,
        is_last=len(leg.running.legs) == 1,
    )


def done_of(running: Running, peer: Peer, hello: Hello, outcome: Outcome) -> Done:
    key = running.key
    return Done(
        epoch=peer.epoch,
        transfer_id=key.transfer_id,
        pair=key.pair,
        consumer=hello.consumer,
        rank=hello.rank,
        tp_size=hello.tp_size,
        outcome=outcome,
        reason=running.reason,
    )
