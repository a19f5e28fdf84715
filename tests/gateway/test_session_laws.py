"""The arbiter's laws under random event sequences: one end, one chain, never two pairs mixed, nobody left at work."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.commands import Command, Emit, Enqueue, Fail, Finish, Owner, QueueCancel, Refuse, SendCancel
from gateway.owner_watch import Debt, Pulse, Verdict, judge
from gateway.session import State
from gateway.settings import GatewaySettings
from pdq.wire.types import Pair, unpack_ids
from tests.event_sequences import many, some
from tests.gateway.test_session import D1, D2, delta, session

WATCH = GatewaySettings(stall_s=10, owner_kv_wait_s=40, owner_silence_s=2.5)
DEADLINE = 100.0


class AnyOrder(RuleBasedStateMachine):
    """Workers with the right to answer produce the one chain; others a chain of their own that must never show."""

    stages = st.sampled_from(["new", "enqueued", "admitted", "streaming", "streaming"])

    @initialize(
        max_tokens=st.integers(2, 30),
        max_migrations=st.integers(0, 5),
        stage=stages,
        is_resumable=st.sampled_from([True, True, False]),
    )
    def begin(self, max_tokens: int, max_migrations: int, stage: str, is_resumable: bool) -> None:
        """`stage`: how far it gets in the usual way, before anything happens."""
        self.it = session(
            max_tokens=max_tokens, max_migrations=max_migrations, deadline=DEADLINE, is_resumable=is_resumable
        )
        self.now = 0.0
        self.emitted: list[int] = []
        self.ends: list[Command] = []
        self.bases: dict[int, int] = {}
        self.refused: set[tuple[Pair, str]] = set()
        self.at_work: set[Owner] = set()
        """Those that have Go, have not finished and were not told to stop."""
        self.in_queue: set[int] = set()
        """Gens that were enqueued and may still be worked on without a Go."""
        self.num_lost = 0
        self.frame_at = self.step_at = self.admitted_at = 0.0
        self.token_at: float | None = None
        if stage != "new":
            self.start()
            self.queue(0, "enqueued")
        if stage in ("admitted", "streaming"):
            self.admit(0, 1, D1)
        if stage == "streaming":
            self.next_tokens(0, 1, None)

    @precondition(lambda self: self.it.state is State.NEW)
    @rule()
    def start(self) -> None:
        self.run(self.it.start())

    def run(self, commands: list[Command]) -> None:
        for command in commands:
            assert not self.ends or isinstance(command, Refuse), "nothing comes after the end"
            match command:
                case Emit(token_ids=token_ids):
                    self.emitted += token_ids
                    self.token_at = self.now
                case Finish() | Fail():
                    self.ends.append(command)
                case SendCancel(owner=owner):
                    self.at_work.remove(owner)  # KeyError: cancelled twice, or without reason
                case QueueCancel(gen=gen):
                    self.in_queue.discard(gen)
                case Enqueue(gen=gen, generated_ids=generated):
                    assert gen == len(self.bases) + 1
                    assert unpack_ids(generated) == self.emitted
                    assert self.it.is_resumable or not self.emitted
                    assert not self.at_work | self.in_queue, "the former gen was stopped before"
                    self.bases[gen] = len(self.emitted)
                    self.in_queue.add(gen)

    rarely = st.sampled_from([False] * 4 + [True])
    """What ends or moves a request: with all of it all the time no sequence would get far."""

    # The queue

    gens = st.sampled_from([0, 0, 0, 0, -1, 1])
    """Of the current one, the one before, the one to come."""

    @rule(gen=gens, event=st.sampled_from(["enqueued"] * 10 + ["lost", "lost", "refused"]))
    def queue(self, gen: int, event: str) -> None:
        gen += self.it.gen
        match event:
            case "enqueued":
                self.run(self.it.on_enqueued(gen))
            case "lost":
                if gen == self.it.gen and self.it.state is State.QUEUED:
                    self.num_lost += 1
                    self.in_queue.discard(gen)
                self.run(self.it.on_job_lost(gen))
            case "refused":
                if gen == self.it.gen and self.it.state is State.ENQUEUEING:
                    self.in_queue.discard(gen)
                self.run(self.it.on_enqueue_failed(gen, "queue_unavailable", "x"))

    # Decode workers

    workers = st.sampled_from([D1, D2])
    attempts = st.integers(1, 3)

    @rule(gen=gens, attempt=attempts, worker=workers)
    def admit(self, gen: int, attempt: int, worker: str) -> None:
        pair = Pair(gen=max(self.it.gen + gen, 1), attempt=attempt)
        before, state = self.it.owner, self.it.state
        is_go, commands = self.it.on_admit(pair, worker, f"tcp://{worker}")
        if pair.gen <= self.it.gen and not is_go:
            self.refused.add((pair, worker))
        if is_go:
            assert pair.gen == self.it.gen
            assert (pair, worker) not in self.refused, "Gone is final"
            assert before is None or (pair, worker) == (before.pair, before.worker) or pair > before.pair
            assert state is not State.STREAMING or self.it.owner == before, "frozen"
            owner = self.it.owner
            assert owner == Owner(worker=worker, endpoint=f"tcp://{worker}", pair=pair)
            if owner != before:
                self.at_work.add(owner)
                self.admitted_at, self.token_at = self.now, None
        self.run(commands)

    @precondition(lambda self: self.it.owner is not None)
    @rule()
    def ask_again(self) -> None:
        owner = self.it.owner
        assert self.it.on_admit(owner.pair, owner.worker, owner.endpoint) == (True, [])

    def chain(self, pair: Pair, worker: str, seq: int, count: int) -> tuple[int, ...]:
        """A rightful owner continues with the index; a stranger would add 1000."""
        owner = self.it.owner
        is_owner = owner is not None and owner.pair == pair and owner.worker == worker
        first = self.bases.get(pair.gen, 0) + seq
        return tuple(range(first, first + count)) if is_owner else tuple(range(1000, 1000 + count))

    @rule(
        gen=gens,
        attempt=attempts,
        worker=workers,
        seq=st.integers(0, 12),
        count=st.integers(0, 4),
        finish=st.sampled_from([None, None, "length", "what?"]),
    )
    def any_tokens(self, gen: int, attempt: int, worker: str, seq: int, count: int, finish: str | None) -> None:
        pair = Pair(gen=max(self.it.gen + gen, 1), attempt=attempt)
        self.send(pair, worker, seq, self.chain(pair, worker, seq, count), finish)

    @precondition(lambda self: self.it.owner is not None)
    @rule(back=st.integers(0, 3), count=st.integers(1, 4), finish=st.sampled_from([None, None, None, "stop"]))
    def next_tokens(self, back: int, count: int, finish: str | None) -> None:
        """`back`: so many of them came before."""
        owner = self.it.owner
        seq = max(len(self.emitted) - self.bases[owner.pair.gen] - back, 0)
        self.send(owner.pair, owner.worker, seq, self.chain(owner.pair, owner.worker, seq, count), finish)

    @precondition(lambda self: self.it.state is State.STREAMING)
    @rule(is_so=rarely)
    def changed_token(self, is_so: bool) -> None:
        if not is_so:
            return
        owner = self.it.owner
        seq = len(self.emitted) - self.bases[owner.pair.gen] - 1
        self.send(owner.pair, owner.worker, seq, (1000, 1001), None)

    def send(self, pair: Pair, worker: str, seq: int, tokens: tuple[int, ...], finish: str | None) -> None:
        owner = self.it.owner
        is_owner = owner is not None and (pair, worker) == (owner.pair, owner.worker)
        commands = self.it.on_delta(worker, delta(pair, seq, tokens, finish))
        if not is_owner:
            assert commands == [Refuse(pair=pair)]
        elif any(isinstance(command, Finish) for command in commands) and not any(
            isinstance(command, QueueCancel) for command in commands
        ):  # it said the end itself; with a QueueCancel the session ended it
            self.at_work.discard(owner)
            self.in_queue.discard(owner.pair.gen)
        self.run(commands)

    @rule(gen=gens, attempt=attempts, is_current=rarely, is_final=rarely)
    def any_failed(self, gen: int, attempt: int, is_current: bool, is_final: bool) -> None:
        if gen == 0 and not is_current:
            return
        pair = Pair(gen=max(self.it.gen + gen, 1), attempt=attempt)
        self.run(self.it.on_failed(pair, "engine_error", "x", retryable=not is_final))

    @precondition(lambda self: self.it.owner is not None)
    @rule(is_so=rarely)
    def owner_failed(self, is_so: bool) -> None:
        if is_so:
            self.run(self.it.on_failed(self.it.owner.pair, "engine_error", "x", retryable=True))

    # Time, and signs of life: `frame` is the link, `step` the counter in it

    @precondition(lambda self: self.it.owner is not None)
    @rule(has_stepped=st.booleans())
    def frame(self, has_stepped: bool) -> None:
        self.frame_at = self.now
        if has_stepped:
            self.step_at = self.now

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.it.owner is not None)
    @rule(is_refused=st.booleans())
    def look_at_owner(self, is_refused: bool) -> None:
        """`is_refused`: a probe finds nobody."""
        owner = self.it.owner
        token_at = self.token_at if self.it.state is State.STREAMING else None
        debt = Debt(endpoint=owner.endpoint, admitted_at=self.admitted_at, token_at=token_at)
        verdict = judge(debt, Pulse(frame_at=self.frame_at, step_at=self.step_at), self.now, WATCH)
        still_s = self.now - max(self.step_at, self.admitted_at, token_at or 0.0)
        if token_at is not None and still_s > WATCH.stall_s:
            assert verdict is Verdict.DEAD, "it owes tokens and makes no step"
        if still_s <= WATCH.stall_s:
            assert verdict is not Verdict.DEAD, "it moves"
        if self.now - max(self.frame_at, self.admitted_at) > WATCH.owner_silence_s:
            assert verdict is not Verdict.ALIVE, "it says nothing"
        if verdict is Verdict.DEAD or (verdict is Verdict.SUSPECT and is_refused):
            self.run(self.it.on_owner_dead(owner.worker))
            assert self.it.owner is None

    @rule(worker=workers, is_so=rarely)
    def dead(self, worker: str, is_so: bool) -> None:
        if is_so:
            self.run(self.it.on_owner_dead(worker))

    @rule()
    def tick(self) -> None:
        self.run(self.it.on_tick(self.now))
        assert self.it.is_closed or self.now < DEADLINE

    # The client and the gateway itself; rarely, or no sequence would get far

    @rule(event=st.sampled_from([None] * 20 + ["stop", "gone", "deadline", "shutdown"]))
    def ends_early(self, event: str | None) -> None:
        if self.it.state is State.NEW and event == "stop":
            return  # there is no text yet
        match event:
            case "stop":
                if self.it.owner is not None:
                    self.in_queue.clear()  # its job left the queue with the Go
                self.run(self.it.on_stop_string())
            case "gone":
                self.run(self.it.on_client_gone())
            case "deadline":
                self.now = max(self.now, DEADLINE)
                self.tick()
            case "shutdown":
                self.run(self.it.on_shutdown())

    @invariant()
    def one_chain_and_one_end(self) -> None:
        if not hasattr(self, "it"):
            return
        assert self.emitted == list(range(len(self.emitted)))
        assert self.emitted == self.it.accepted.tolist()
        assert len(self.ends) == (1 if self.it.is_closed else 0)

    @invariant()
    def only_the_owner_is_at_work(self) -> None:
        if not hasattr(self, "it"):
            return
        assert self.at_work == ({self.it.owner} if self.it.owner is not None else set())
        assert self.in_queue <= {self.it.gen}
        assert not (self.it.is_closed and self.in_queue)

    @invariant()
    def migrations_are_bounded(self) -> None:
        if not hasattr(self, "it"):
            return
        assert self.it.migrations <= self.it.max_migrations
        assert len(self.bases) <= 1 + self.it.migrations + self.num_lost


TestAnyOrder = some(AnyOrder, 200, num_steps=40)
test_ten_thousand_sequences = many(AnyOrder, num_steps=40)
