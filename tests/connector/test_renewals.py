"""D's scheduler half towards P: renewals and last words, without threads."""

from __future__ import annotations

from connector.renewals import Renewals
from connector.settings import ConnectorSettings
from connector.side_channel import Done, DoneAck, Gone, Renew, Renewed
from connector.transfers import Outcome
from pdq.wire.types import KvTicket, Pair, pack_ids

PAIR = Pair(gen=1, attempt=2)
SETTINGS = ConnectorSettings(kv_lease_s=9.0, kv_answer_s=0.5, kv_answer_tries=3)
HERE = {"epoch": "p-1", "transfer_id": "r1", "pair": PAIR}


def ticket(tp_size: int = 1) -> KvTicket:
    return KvTicket(
        transfer_id="r1",
        pair=PAIR,
        engine_id="p",
        epoch="p-1",
        host="h",
        port=70,
        tp_size=tp_size,
        block_size=16,
        num_tokens=16,
        block_ids=pack_ids([1]),
    )


def waiting(tp_size: int = 1) -> Renewals:
    renewals = Renewals(SETTINGS, consumer="d-1", tp_size=tp_size)
    renewals.start("e1", ticket(tp_size), 0.0)
    return renewals


def test_every_rank_is_renewed_each_third_of_a_lease():
    renewals = waiting(tp_size=2)

    first, early, second = renewals.tick(0.1), renewals.tick(3.0), renewals.tick(3.2)

    renew = Renew(**HERE, consumer="d-1")
    assert first == second == [("tcp://h:70", renew), ("tcp://h:71", renew)]
    assert early == []


def test_no_renewal_comes_after_the_worker_half_took_over():
    renewals = waiting()
    renewals.stop("e1")

    assert renewals.tick(5.0) == []
    assert renewals.next_at() is None


def test_gone_of_one_rank_is_told_once_and_ends_the_renewals():
    renewals = waiting(tp_size=2)
    renewals.on_message("tcp://h:71", Gone(**HERE, reason="released"), 1.0)
    renewals.on_message("tcp://h:70", Gone(**HERE, reason="released"), 1.0)

    assert renewals.take_gone() == {"e1": "P says gone: released"}
    assert renewals.take_gone() == {}
    assert renewals.tick(5.0) == []


def test_one_silent_rank_for_a_lease_means_gone():
    renewals = waiting(tp_size=2)
    for now in (0.1, 3.2, 6.3, 9.4):
        renewals.tick(now)
        renewals.on_message("tcp://h:70", Renewed(**HERE), now)
    assert renewals.take_gone() == {"e1": "P has not answered for 9 s"}


def test_answers_keep_a_request_waiting():
    renewals = waiting()
    for now in range(1, 60):
        renewals.tick(float(now))
        renewals.on_message("tcp://h:70", Renewed(**HERE), float(now))
    assert renewals.take_gone() == {}


def test_the_last_word_is_repeated_until_acknowledged():
    renewals = waiting()
    renewals.stop("e1")
    renewals.say_done(ticket(), Outcome.CANCELLED, "aborted", 1.0)

    (endpoint, message), *_ = renewals.tick(1.0)
    again = renewals.tick(1.5)
    renewals.on_message("tcp://h:70", DoneAck(**HERE), 1.6)

    assert isinstance(message, Done)
    assert (endpoint, message.rank, message.outcome) == ("tcp://h:70", None, Outcome.CANCELLED)
    assert again == [("tcp://h:70", message)]
    assert renewals.tick(9.0) == []


def test_a_last_word_without_answer_is_given_up():
    renewals = waiting()
    renewals.stop("e1")
    renewals.say_done(ticket(), Outcome.OK, "", 0.0)

    assert sum(len(renewals.tick(now / 2)) for now in range(20)) == 3
    assert renewals.next_at() is None
