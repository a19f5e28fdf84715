"""One request inside the engine: its state, and what each event makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.embedded.runner import Chunk, TokenSequence
from pdq.wire.types import TokenLogprob, TransferStats


class State(Enum):
    WAITING = auto()
    """Holds no blocks: new, or preempted."""
    WAITING_FOR_REMOTE_KVS = auto()
    """Holds its blocks; the connector writes into them."""
    RUNNING = auto()
    FINISHED_PINNED = auto()
    """Answered; the blocks stay until the connector reports `finished_sending`."""
    DRAINING = auto()
    """Aborted while remote KV came in; the blocks stay until the connector reports `finished_recving`."""
    FINISHED = auto()
    """Blocks are free: forgotten."""


class Event(Enum):
    ADMITTED = auto()
    ADMITTED_REMOTE = auto()
    LOADED = auto()
    PREEMPTED = auto()
    ENDED = auto()
    """Finished, failed or aborted, and no peer can touch the blocks."""
    ENDED_PINNED = auto()
    ABORTED_LOADING = auto()
    DRAINED = auto()
    SENT = auto()


class IllegalTransition(Exception):
    """An event that can't happen in this state: our bug."""


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMITTED): State.RUNNING,
    (State.WAITING, Event.ADMITTED_REMOTE): State.WAITING_FOR_REMOTE_KVS,
    (State.WAITING, Event.ENDED): State.FINISHED,
    (State.WAITING_FOR_REMOTE_KVS, Event.LOADED): State.RUNNING,
    (State.WAITING_FOR_REMOTE_KVS, Event.ENDED): State.FINISHED,  # the load failed, or was done and not yet noticed
    (State.WAITING_FOR_REMOTE_KVS, Event.ABORTED_LOADING): State.DRAINING,
    (State.RUNNING, Event.PREEMPTED): State.WAITING,
    (State.RUNNING, Event.ENDED): State.FINISHED,
    (State.RUNNING, Event.ENDED_PINNED): State.FINISHED_PINNED,
    (State.DRAINING, Event.DRAINED): State.FINISHED,
    (State.FINISHED_PINNED, Event.SENT): State.FINISHED,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the scheduler knows of one request. `sequence` is the part that runners see."""

    sequence: TokenSequence
    decode_chunk: Chunk
    """Its part of a step that computes one token; made once for all of them."""
    arrival: int
    """Order of arrival, 0, 1, ...; the highest one is the youngest, preempted first."""
    is_prefill_only: bool
    max_tokens: int
    """Generated tokens at which it ends, those generated elsewhere before included."""
    state: State = State.WAITING
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    """Blocks 0 .. num_published - 1 were offered to the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens found in the local prefix cache when it was first admitted."""
    was_admitted: bool = False
    reads_prefix_cache: bool = True
    """False: prompt logprobs need the logits of every prompt position."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    transfer: TransferStats | None = None

    @property
    def engine_request_id(self) -> str:
        return self.sequence.engine_request_id

    @property
    def num_generated(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens

    def on(self, event: Event) -> None:
        """Changes the state, or raises IllegalTransition."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"{event.name} in {self.state.name}: request {self.engine_request_id}")
        self.state = following

    def place(self, shared_blocks: list[int], new_blocks: list[int], num_local: int) -> None:
        """It has been admitted: its block table, the first `num_local` tokens of which are computed already."""
        self.sequence.block_ids = shared_blocks + new_blocks
        self.sequence.num_computed = num_local
        self.num_published = len(shared_blocks)
        if not self.was_admitted:
            self.was_admitted = True
            self.cached_tokens = num_local

    def displace(self) -> None:
        """It has been preempted: nothing is computed any more, its tokens stay."""
        self.on(Event.PREEMPTED)
        self.sequence.block_ids = []
        self.sequence.num_computed = 0
        self.sequence.num_preemptions += 1
        self.num_published = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
