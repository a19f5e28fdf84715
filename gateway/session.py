"""Life of one request: who may answer it, what was delivered, when it is over. Pure: `now` is an argument.

States, and the events that lead on:

    NEW --start--> ENQUEUEING --on_enqueued--> QUEUED --on_admit--> ADMITTED --on_delta--> STREAMING --> CLOSED
                       ^  |______________________on_admit______________^|                     |
                       |________________failed (retryable), owner dead, job lost _____________|   gen + 1

Laws (tests/gateway/test_session_laws.py runs random event sequences against them):
1. Exactly one terminal command: Finish or Fail.
2. The emitted tokens are one chain: no repeat, no gap, no change, and between two gens the next one continues
   from exactly what was delivered.
3. A pair may rise until one of its tokens was accepted; from then on only the gateway raises `gen`.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Final

from broker.messages import Delta
from gateway.commands import Command, Emit, Enqueue, Fail, Finish, Owner, QueueCancel, Refuse, SendCancel
from pdq.wire.types import Pair, pack_ids, unpack_ids


class State(Enum):
    NEW = "new"
    ENQUEUEING = "enqueueing"
    QUEUED = "queued"
    ADMITTED = "admitted"
    STREAMING = "streaming"
    CLOSED = "closed"


_NEXT: Final[dict[State, frozenset[State]]] = {
    State.NEW: frozenset({State.ENQUEUEING, State.CLOSED}),
    State.ENQUEUEING: frozenset({State.QUEUED, State.ADMITTED, State.ENQUEUEING, State.CLOSED}),
    State.QUEUED: frozenset({State.ADMITTED, State.ENQUEUEING, State.CLOSED}),
    State.ADMITTED: frozenset({State.ADMITTED, State.STREAMING, State.ENQUEUEING, State.CLOSED}),
    State.STREAMING: frozenset({State.ENQUEUEING, State.CLOSED}),
    State.CLOSED: frozenset(),
}

_WHERE: Final = {
    State.ENQUEUEING: "before the queue took it",
    State.QUEUED: "in the queue or at a prefill worker",
    State.ADMITTED: "before its KV and its first token came",
    State.STREAMING: "while decoding",
}


class IllegalTransition(Exception):
    """Our own code asked a session for something that its state has no way to do."""


class Session:
    """The arbiter of one request. Every method takes an event and returns the commands to carry out, in order."""

    __slots__ = (
        "_base",
        "accepted",
        "deadline",
        "gen",
        "is_resumable",
        "max_migrations",
        "max_tokens",
        "migrations",
        "owner",
        "request_id",
        "state",
    )

    def __init__(
        self, *, request_id: str, max_tokens: int, deadline: float, max_migrations: int, is_resumable: bool = True
    ) -> None:
        """`is_resumable` False: once a token was delivered nobody else can go on, as with an output format, whose
        state is the decode worker's."""
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.deadline = deadline
        self.max_migrations = max_migrations
        self.is_resumable = is_resumable
        self.state = State.NEW
        self.gen = 0
        self.migrations = 0
        self.owner: Owner | None = None
        self.accepted: array[int] = array("I")
        self._base = 0  # tokens that were accepted before the current pair began

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def start(self) -> list[Command]:
        return [self._enqueue()]

    def on_enqueued(self, gen: int) -> list[Command]:
        """The queue has the job. A worker may have been faster: then nothing changes."""
        if gen == self.gen and self.state is State.ENQUEUEING:
            self._move(State.QUEUED)
        return []

    def on_enqueue_failed(self, gen: int, code: str, message: str) -> list[Command]:
        """The queue refused the job for good."""
        if gen != self.gen or self.state is not State.ENQUEUEING:
            return []
        return self._close(Fail(code=code, message=message))

    def on_admit(self, pair: Pair, worker: str, endpoint: str) -> tuple[bool, list[Command]]:
        """May this worker answer as this pair? (Go or Gone, commands). Asking again gets the same answer.

        Two workers for one pair before its first token: it is unknown who still has it, so both lose it.
        """
        if self.state in (State.NEW, State.CLOSED) or pair.gen != self.gen:
            return False, []
        former = self.owner
        if former is not None:
            if pair == former.pair and worker == former.worker:
                return True, []
            if self.state is State.STREAMING or pair < former.pair:
                return False, []
            if pair == former.pair:  # its prefill worker has turned to another one: nobody may hold it any more
                return False, self._migrate("admit_conflict", f"{former.worker} had Go, {worker} asked for it too")
        self._move(State.ADMITTED)
        self.owner = Owner(worker=worker, endpoint=endpoint, pair=pair)
        self._base = len(self.accepted)
        return True, [] if former is None else [SendCancel(owner=former, reason="superseded")]

    def on_delta(self, worker: str, delta: Delta) -> list[Command]:
        """Takes over what is new in it; a replay is cut to its new part, a gap moves the request to the next gen."""
        owner = self.owner
        if owner is None or delta.pair != owner.pair or worker != owner.worker:
            return [Refuse(pair=delta.pair)]
        token_ids = unpack_ids(delta.token_ids)
        logprobs = delta.logprobs
        known = len(self.accepted) - self._base
        if delta.seq != known:
            if delta.seq > known:
                return self._migrate("delta_gap", f"tokens {known} to {delta.seq - 1} of pair {delta.pair} are missing")
            overlap = min(known - delta.seq, len(token_ids))
            start = self._base + delta.seq
            if self.accepted[start : start + overlap].tolist() != token_ids[:overlap]:
                return self._migrate("delta_mismatch", f"tokens of pair {delta.pair} changed after they were delivered")
            token_ids = token_ids[overlap:]
            logprobs = None if logprobs is None else logprobs[overlap:]
        if delta.finish not in (None, "stop", "length"):
            return self._migrate("engine_error", f"unknown finish reason {delta.finish!r}")
        commands: list[Command] = []
        if token_ids:
            if self.state is State.ADMITTED:
                self._move(State.STREAMING)
            self.accepted.extend(token_ids)
            commands.append(Emit(token_ids, logprobs, delta.stop_token_id))
        if delta.finish == "length" and (missing := self.max_tokens - len(self.accepted)) > 0:
            detail = f"{worker} ended at a limit of its own, {missing} tokens before max_tokens"
            commands += self._migrate("answer_cut_short", detail)
        elif delta.finish is not None:
            commands += self._close(Finish(reason=delta.finish, stats=delta.stats))
        return commands

    def on_failed(self, pair: Pair, code: str, detail: str, *, retryable: bool) -> list[Command]:
        """A pair will not produce an answer. News of a pair that isn't the deciding one changes nothing."""
        if self.state in (State.NEW, State.CLOSED) or pair.gen != self.gen:
            return []
        if self.owner is not None and pair != self.owner.pair:
            return []
        if retryable:
            return self._migrate(code, detail)
        return self._abandon(Fail(code=code, message=detail))

    def on_owner_dead(self, worker: str) -> list[Command]:
        """The process that has Go will never answer. Before Go the queue's leases look after the request."""
        if self.owner is None or self.owner.worker != worker:
            return []
        return self._migrate("decode_worker_lost", f"decode worker {worker} is gone")

    def on_job_lost(self, gen: int) -> list[Command]:
        """The queue has no trace of the job: put it in again. Not a migration: no worker failed."""
        if gen != self.gen or self.state is not State.QUEUED:
            return []
        return [QueueCancel(gen=gen), self._enqueue()]  # some of it may be there still

    def on_stop_string(self) -> list[Command]:
        """The text contains a stop string: what the worker would still generate is not wanted."""
        if self.state is State.CLOSED:
            return []
        owner = self.owner
        cancel = QueueCancel(gen=self.gen) if owner is None else SendCancel(owner=owner, reason="stop_string")
        return [cancel, *self._close(Finish(reason="stop"))]

    def on_client_gone(self) -> list[Command]:
        return self._end_early("client_disconnected", "the client closed the connection")

    def on_shutdown(self) -> list[Command]:
        return self._end_early("shutting_down", "the gateway is shutting down")

    def on_tick(self, now: float) -> list[Command]:
        if now < self.deadline:
            return []
        where, delivered = _WHERE.get(self.state, ""), len(self.accepted)
        return self._end_early("deadline_exceeded", f"deadline passed {where}; {delivered} tokens were generated")

    def _end_early(self, code: str, message: str) -> list[Command]:
        if self.state is State.CLOSED:
            return []
        return self._abandon(Fail(code=code, message=message))

    def _abandon(self, end: Fail | Finish) -> list[Command]:
        """Closes and stops whoever may still be at work: the queue's job and the decode worker."""
        stops: list[Command] = [QueueCancel(gen=self.gen)] if self.gen else []
        if self.owner is not None:
            stops.append(SendCancel(owner=self.owner, reason=end.code if isinstance(end, Fail) else end.reason))
        return stops + self._close(end)

    def _migrate(self, code: str, detail: str) -> list[Command]:
        if len(self.accepted) >= self.max_tokens:
            return self._abandon(Finish(reason="length"))  # all was delivered, only the word "finished" got lost
        if self.accepted and not self.is_resumable:
            return self._abandon(Fail(code=code, message=f"{detail} (no other worker can go on within its format)"))
        if self.migrations >= self.max_migrations:
            return self._abandon(Fail(code=code, message=f"{detail} (given up after {self.migrations} migrations)"))
        stops: list[Command] = [QueueCancel(gen=self.gen)]
        if self.owner is not None:
            stops.append(SendCancel(owner=self.owner, reason=code))
        self.migrations += 1
        return [*stops, self._enqueue()]

    def _enqueue(self) -> Enqueue:
        self._move(State.ENQUEUEING)
        self.gen += 1
        self.owner = None
        self._base = len(self.accepted)
        return Enqueue(gen=self.gen, generated_ids=pack_ids(self.accepted))

    def _close(self, end: Finish | Fail) -> list[Command]:
        self._move(State.CLOSED)
        self.owner = None
        return [end]

    def _move(self, to: State) -> None:
        if to not in _NEXT[self.state]:
            raise IllegalTransition(f"{self.request_id}: {self.state.value} -> {to.value}")
        self.state = to
