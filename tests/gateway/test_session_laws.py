"""The arbiter's laws under random event sequences: one end, one chain, never two pairs mixed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.session import Command, Emit, Enqueue, Fail, Finish, Refuse, State
from pdq.wire.types import Pair, unpack_ids
from tests.gateway.test_session import D1, D2, delta, session


class AnyOrder(RuleBasedStateMachine):
    """Workers with the right to answer produce the one chain; others a chain of their own that must never show."""

    @initialize(max_tokens=st.integers(1, 12), max_migrations=st.integers(0, 3))
    def begin(self, max_tokens, max_migrations):
        self.it = session(max_tokens=max_tokens, max_migrations=max_migrations)
        self.emitted: list[int] = []
        self.ends: list[Command] = []
        self.bases: dict[int, int] = {}
        self.gone: dict[tuple[Pair, str], bool] = {}
        self.num_enqueued = 0
        self.run(self.it.start())

    def run(self, commands):
        for command in commands:
            assert not self.ends or isinstance(command, Refuse), "nothing comes after the end"
            match command:
                case Emit(token_ids=token_ids):
                    self.emitted += token_ids
                case Finish() | Fail():
                    self.ends.append(command)
                case Enqueue(gen=gen, generated_ids=generated):
                    self.num_enqueued += 1
                    assert gen == self.num_enqueued
                    assert unpack_ids(generated) == self.emitted
                    self.bases[gen] = len(self.emitted)

    def chain(self, pair: Pair, worker: str, seq: int, count: int) -> tuple[int, ...]:
        """A rightful owner continues with the index; a stranger would add 1000."""
        owner = self.it.owner
        is_owner = owner is not None and owner.pair == pair and owner.worker == worker
        first = self.bases.get(pair.gen, 0) + seq
        return tuple(range(first, first + count)) if is_owner else tuple(range(1000, 1000 + count))

    pairs = st.builds(Pair, gen=st.integers(1, 4), attempt=st.integers(1, 3))
    workers = st.sampled_from([D1, D2])

    @rule(pair=pairs, worker=workers)
    def admit(self, pair, worker):
        before, state = self.it.owner, self.it.state
        is_go, commands = self.it.on_admit(pair, worker, f"tcp://{worker}")
        if is_go and before is not None:
            assert pair >= before.pair
            assert state is not State.STREAMING or pair == before.pair
        if is_go:
            assert pair.gen == self.it.gen
        self.run(commands)

    @rule(pair=pairs, worker=workers, seq=st.integers(0, 12), count=st.integers(0, 4), is_last=st.booleans())
    def tokens(self, pair, worker, seq, count, is_last):
        finish = "length" if is_last else None
        self.run(self.it.on_delta(worker, delta(pair, seq, self.chain(pair, worker, seq, count), finish)))

    @precondition(lambda self: self.it.owner is not None)
    @rule(count=st.integers(1, 3), is_last=st.booleans())
    def next_tokens(self, count, is_last):
        owner = self.it.owner
        seq = len(self.emitted) - self.bases[owner.pair.gen]
        tokens = self.chain(owner.pair, owner.worker, seq, count)
        self.run(self.it.on_delta(owner.worker, delta(owner.pair, seq, tokens, "stop" if is_last else None)))

    @rule(pair=pairs, is_retryable=st.booleans())
    def failed(self, pair, is_retryable):
        self.run(self.it.on_failed(pair, "engine_error", "x", retryable=is_retryable))

    @rule(worker=workers)
    def owner_dead(self, worker):
        self.run(self.it.on_owner_dead(worker))

    @rule(gen=st.integers(1, 4), event=st.sampled_from(["enqueued", "lost", "refused"]))
    def queue(self, gen, event):
        match event:
            case "enqueued":
                self.run(self.it.on_enqueued(gen))
            case "lost":
                self.run(self.it.on_job_lost(gen))
            case "refused":
                self.run(self.it.on_enqueue_failed(gen, "queue_unavailable", "x"))

    @rule(event=st.sampled_from(["stop", "gone", "tick", "late_tick", "shutdown"]))
    def ends_early(self, event):
        match event:
            case "stop":
                self.run(self.it.on_stop_string())
            case "gone":
                self.run(self.it.on_client_gone())
            case "tick":
                self.run(self.it.on_tick(1.0))
            case "late_tick":
                self.run(self.it.on_tick(1000.0))
            case "shutdown":
                self.run(self.it.on_shutdown())

    @invariant()
    def one_chain_and_one_end(self):
        if not hasattr(self, "it"):
            return
        assert self.emitted == list(range(len(self.emitted)))
        assert self.emitted == self.it.accepted.tolist()
        assert len(self.ends) == (1 if self.it.is_closed else 0)


AnyOrder.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase
