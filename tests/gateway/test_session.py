"""The arbiter: rules one by one, then random event sequences against its laws."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.messages import Delta
from gateway.session import (
    Command,
    Emit,
    Enqueue,
    Fail,
    Finish,
    IllegalTransition,
    QueueCancel,
    Refuse,
    SendCancel,
    Session,
    State,
)
from pdq.wire.types import Pair, pack_ids, unpack_ids

D1, D2 = "decode-1", "decode-2"


def session(max_tokens: int = 8, deadline: float = 100.0, max_migrations: int = 3) -> Session:
    return Session(request_id="r", max_tokens=max_tokens, deadline=deadline, max_migrations=max_migrations)


def queued(**kwargs: float) -> Session:
    it = session(**kwargs)  # type: ignore[arg-type]
    it.start()
    it.on_enqueued(1)
    return it


def streaming(tokens: tuple[int, ...] = (1, 2)) -> Session:
    it = queued()
    assert it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1")[0]
    it.on_delta(D1, delta(Pair(gen=1, attempt=1), 0, tokens))
    return it


def delta(pair: Pair, seq: int, tokens: tuple[int, ...], finish: str | None = None) -> Delta:
    return Delta(request_id="r", pair=pair, seq=seq, token_ids=pack_ids(tokens), finish=finish)


def test_a_worker_may_be_faster_than_the_queue_s_answer():
    it = session()
    it.start()

    assert it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1") == (True, [])
    assert it.on_enqueued(1) == []
    assert it.state is State.ADMITTED


def test_asking_again_for_the_same_pair_is_answered_the_same():
    it = queued()
    pair = Pair(gen=1, attempt=1)

    assert [it.on_admit(pair, D1, "tcp://d1")[0] for _ in range(3)] == [True] * 3
    assert it.on_admit(pair, D2, "tcp://d2") == (False, [])


def test_a_higher_attempt_takes_over_before_the_first_token_and_the_lower_one_is_cancelled():
    it = queued()
    it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1")
    former = it.owner

    is_go, commands = it.on_admit(Pair(gen=1, attempt=2), D2, "tcp://d2")

    assert is_go
    assert commands == [SendCancel(owner=former, reason="superseded")]
    assert it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1") == (False, [])


def test_after_the_first_token_the_pair_is_frozen():
    it = streaming()

    assert it.on_admit(Pair(gen=1, attempt=2), D2, "tcp://d2") == (False, [])
    assert it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1") == (True, [])
    assert it.on_delta(D2, delta(Pair(gen=1, attempt=2), 0, (9,))) == [Refuse(pair=Pair(gen=1, attempt=2))]


def test_a_replayed_delta_gives_only_what_is_new():
    it = streaming((1, 2))
    pair = Pair(gen=1, attempt=1)

    assert it.on_delta(D1, delta(pair, 0, (1, 2))) == []
    assert it.on_delta(D1, delta(pair, 1, (2, 3))) == [Emit([3], None, None)]


def test_a_gap_moves_the_request_to_the_next_gen_with_what_was_delivered():
    it = streaming((1, 2))
    owner = it.owner

    commands = it.on_delta(D1, delta(Pair(gen=1, attempt=1), 3, (4,)))

    assert commands == [
        QueueCancel(gen=1),
        SendCancel(owner=owner, reason="delta_gap"),
        Enqueue(gen=2, generated_ids=pack_ids([1, 2])),
    ]


def test_changed_tokens_are_not_taken_over():
    it = streaming((1, 2))

    commands = it.on_delta(D1, delta(Pair(gen=1, attempt=1), 1, (7, 3)))

    assert isinstance(commands[-1], Enqueue)
    assert it.accepted.tolist() == [1, 2]


def test_a_migrated_request_goes_on_after_the_delivered_tokens():
    it = streaming((1, 2))
    it.on_owner_dead(D1)
    it.on_admit(Pair(gen=2, attempt=1), D2, "tcp://d2")

    commands = it.on_delta(D2, delta(Pair(gen=2, attempt=1), 0, (3,), finish="stop"))

    assert commands == [Emit([3], None, None), Finish(reason="stop")]
    assert it.accepted.tolist() == [1, 2, 3]


def test_a_request_whose_tokens_were_all_delivered_is_finished_not_migrated():
    it = streaming(tuple(range(8)))

    commands = it.on_owner_dead(D1)

    assert commands[-1] == Finish(reason="length")


def test_migrations_are_bounded():
    it = queued(max_migrations=1)
    it.on_failed(Pair(gen=1, attempt=1), "kv_transfer_failed", "lost", retryable=True)

    commands = it.on_failed(Pair(gen=2, attempt=1), "kv_transfer_failed", "lost again", retryable=True)

    assert isinstance(commands[-1], Fail)
    assert commands[-1].code == "kv_transfer_failed"


def test_a_failure_of_another_pair_than_the_owner_s_changes_nothing():
    it = streaming()

    assert it.on_failed(Pair(gen=1, attempt=2), "max_attempts", "dead letter", retryable=False) == []


def test_a_dead_letter_before_go_ends_the_request():
    it = queued()

    commands = it.on_failed(Pair(gen=1, attempt=3), "max_attempts", "3 failures", retryable=False)

    assert commands[-1] == Fail(code="max_attempts", message="3 failures")


def test_the_deadline_stops_queue_and_worker():
    it = streaming()
    owner = it.owner

    assert it.on_tick(99.9) == []
    commands = it.on_tick(100.0)

    assert commands[:2] == [QueueCancel(gen=1), SendCancel(owner=owner, reason="deadline_exceeded")]
    assert isinstance(commands[2], Fail)
    assert it.on_tick(101.0) == []


def test_a_lost_job_is_no_migration():
    it = queued(max_migrations=0)

    assert it.on_job_lost(1) == [Enqueue(gen=2, generated_ids=b"")]
    assert it.on_job_lost(1) == []


def test_a_stop_string_ends_it_and_stops_the_worker():
    it = streaming()
    owner = it.owner

    assert it.on_stop_string() == [SendCancel(owner=owner, reason="stop_string"), Finish(reason="stop")]
    assert it.on_client_gone() == []


def test_starting_twice_is_our_own_mistake():
    it = queued()
    it.on_client_gone()

    with pytest.raises(IllegalTransition):
        it.start()


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
