"""What a push is made of on both sides, what the cores want done, and P's messages. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.greetings import Peer
from connector.layout import Runs
from connector.legs import Send
from connector.push_states import PUSH_TABLE, RECV_TABLE, PushEvent, PushState, RecvEvent, RecvState
from connector.side_channel import Answer, Hello, Open, PushDone, PushFail, RecvReady
from connector.step import Push, Receive
from connector.transfers import Outcome, TransferKey, next_state
from pdq.wire.types import TransferStats

ReplyTo = Callable[[Answer], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWrite:
    """Ends with one of `written`, `dropped` or `broken`."""

    job_id: int
    push_id: int
    address: str
    runs: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWrites:
    push_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """P: nothing reads the blocks any more, and D knows how it ended or can't be told."""

    engine_request_id: str
    key: TransferKey
    peer: str
    outcome: Outcome
    reason: str
    stats: TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceTransport:
    """D: ends with `fenced`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveReport:
    """D: nothing writes the blocks any more."""

    receive: Receive
    outcome: Outcome
    reason: str
    stats: TransferStats


PushAction = Send | StartWrite | StopWrites | PushReport
ReceiveAction = Send | FenceTransport | ReceiveReport


@dataclass(slots=True, kw_only=True, eq=False)
class Outgoing:
    """P: one push of this rank. Known by its request, by RECV_READY, or by both; either may come first."""

    push_id: int
    key: TransferKey
    created_at: float
    request: Push | None = None
    ready: RecvReady | None = None
    ready_at: float = 0.0
    target_ids: list[int] = field(default_factory=list)
    """D's blocks that this rank writes. Empty: D has all, or a spare writes nothing."""
    is_spare: bool = False
    """Another rank has the same heads, and writes them."""
    peer: Peer | None = None
    state: PushState = PushState.AWAITING
    address: str = ""
    generation: int = 0
    broken_generation: int | None = None
    num_retries: int = 0
    is_drained: bool = True
    """False: a call failed and D's transport has not been replaced since."""
    blocks: list[int] = field(default_factory=list)
    """P's block table, as far as it is or becomes final."""
    final: dict[str, int] = field(default_factory=dict)
    """Per layer: blocks 0 .. n - 1 are final."""
    queued: dict[str, int] = field(default_factory=dict)
    """Per layer: blocks 0 .. n - 1 were given to the writing thread, or are not needed."""
    jobs: set[int] = field(default_factory=set)
    complete_at: float | None = None
    """The prefill's last layer was final."""
    is_awaited: bool = False
    """The engine is through with it, and waits for its id."""
    is_left: bool = False
    """The engine is through with it."""
    is_settled: bool = False
    outcome: Outcome | None = None
    reason: str = ""
    cancel_reply: ReplyTo | None = None
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0

    def fire(self, event: PushEvent) -> None:
        self.state = next_state(PUSH_TABLE, self.state, event)

    @property
    def num_blocks(self) -> int:
        """Of the whole prompt."""
        assert self.request is not None
        return -(-self.request.num_tokens // self.request.block_size)

    @property
    def stats(self) -> TransferStats:
        return TransferStats(
            num_bytes=self.num_bytes,
            num_descriptors=self.num_descriptors,
            seconds=self.seconds,
            hidden_seconds=self.hidden_seconds,
        )

    def add_time(self, began: float, ended: float) -> None:
        """A call for this push."""
        self.seconds += ended - began
        until = ended if self.complete_at is None else min(ended, self.complete_at)
        self.hidden_seconds += max(until - began, 0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class RecvLeg:
    rank: int
    endpoint: str
    state: RecvState = RecvState.AWAITED
    stats: TransferStats | None = None

    def fire(self, event: RecvEvent) -> None:
        self.state = next_state(RECV_TABLE, self.state, event)


@dataclass(slots=True, kw_only=True, eq=False)
class Incoming:
    """D: one push into this rank's blocks."""

    receive: Receive
    key: TransferKey
    deadline: float
    legs: dict[int, RecvLeg] = field(default_factory=dict)
    """By P's rank."""
    outcome: Outcome | None = None
    reason: str = ""


def open_of(push: Outgoing, hello: Hello) -> Open:
    assert push.peer is not None
    return Open(
        epoch=push.peer.epoch,
        transfer_id=push.key.transfer_id,
        pair=push.key.pair,
        producer=hello.consumer,
        rank=hello.rank,
        tp_size=hello.tp_size,
        broken_generation=push.broken_generation,
    )


def verdict_of(push: Outgoing, hello: Hello) -> PushDone | PushFail:
    assert push.peer is not None
    if push.outcome is not Outcome.OK or push.request is None:
        return PushFail(
            epoch=push.peer.epoch,
            transfer_id=push.key.transfer_id,
            pair=push.key.pair,
            producer=hello.consumer,
            rank=hello.rank,
            reason=push.reason,
            is_drained=push.is_drained,
        )
    return PushDone(
        epoch=push.peer.epoch,
        transfer_id=push.key.transfer_id,
        pair=push.key.pair,
        producer=hello.consumer,
        rank=hello.rank,
        num_tokens=push.request.num_tokens,
        num_bytes=push.num_bytes,
        num_descriptors=push.num_descriptors,
        seconds=push.seconds,
        hidden_seconds=push.hidden_seconds,
        is_spare=push.is_spare,
    )
