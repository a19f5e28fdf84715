"""The arbiter's rules, one by one."""

from __future__ import annotations

import pytest

from broker.messages import Delta
from gateway.commands import Emit, Enqueue, Fail, Finish, QueueCancel, Refuse, SendCancel
from gateway.session import IllegalTransition, Session, State
from pdq.wire.types import Pair, pack_ids

D1, D2 = "decode-1", "decode-2"


def session(
    max_tokens: int = 8, deadline: float = 100.0, max_migrations: int = 3, is_resumable: bool = True
) -> Session:
    return Session(
        request_id="r",
        max_tokens=max_tokens,
        deadline=deadline,
        max_migrations=max_migrations,
        is_resumable=is_resumable,
    )


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


def test_two_workers_for_one_pair_both_lose_it_before_the_first_token():
    it = queued()
    pair = Pair(gen=1, attempt=1)
    it.on_admit(pair, D1, "tcp://d1")
    former = it.owner

    is_go, commands = it.on_admit(pair, D2, "tcp://d2")

    assert not is_go
    assert commands == [
        QueueCancel(gen=1),
        SendCancel(owner=former, reason="admit_conflict"),
        Enqueue(gen=2, generated_ids=b""),
    ]


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


def test_what_nobody_else_can_go_on_with_ends_with_its_worker():
    it = queued(is_resumable=False)
    pair = Pair(gen=1, attempt=1)
    it.on_admit(pair, D1, "tcp://d1")
    owner = it.owner
    it.on_delta(D1, delta(pair, 0, (1, 2)))

    commands = it.on_owner_dead(D1)

    assert commands[:2] == [QueueCancel(gen=1), SendCancel(owner=owner, reason="decode_worker_lost")]
    assert commands[2:] == [
        Fail(
            code="decode_worker_lost",
            message="decode worker decode-1 is gone (no other worker can go on within its format)",
        )
    ]


def test_before_its_first_token_anything_can_start_anew():
    it = queued(is_resumable=False)
    it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1")

    assert it.on_owner_dead(D1)[-1] == Enqueue(gen=2, generated_ids=b"")


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


def test_the_deadline_says_where_it_passed():
    new, waiting = session(), queued()
    new.start()
    admitted = queued()
    admitted.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1")

    told = [it.on_tick(100.0)[-1].message for it in (new, waiting, admitted, streaming((1, 2, 3)))]

    assert told == [
        "deadline passed before the queue took it; 0 tokens were generated",
        "deadline passed in the queue or at a prefill worker; 0 tokens were generated",
        "deadline passed before its KV and its first token came; 0 tokens were generated",
        "deadline passed while decoding; 3 tokens were generated",
    ]


def test_a_lost_job_is_no_migration():
    it = queued(max_migrations=0)

    assert it.on_job_lost(1) == [QueueCancel(gen=1), Enqueue(gen=2, generated_ids=b"")]
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


def test_a_worker_that_stops_at_a_limit_of_its_own_does_not_end_the_answer():
    it = streaming(tokens=(1, 2))
    owner = it.owner

    commands = it.on_delta(D1, delta(Pair(gen=1, attempt=1), 2, (3,), finish="length"))

    assert commands == [
        Emit([3], None, None),
        QueueCancel(gen=1),
        SendCancel(owner=owner, reason="answer_cut_short"),
        Enqueue(gen=2, generated_ids=pack_ids([1, 2, 3])),
    ]


def test_when_every_worker_stops_short_the_client_is_told_an_error_not_a_length():
    it = queued(max_migrations=0)
    it.on_admit(Pair(gen=1, attempt=1), D1, "tcp://d1")

    *_, end = it.on_delta(D1, delta(Pair(gen=1, attempt=1), 0, (1, 2, 3), finish="length"))

    assert isinstance(end, Fail)
    assert end.code == "answer_cut_short"
    assert "5 tokens before max_tokens" in end.message
