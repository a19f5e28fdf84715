"""D's scheduler half towards P in push: where its blocks are, again and again, without threads."""

from __future__ import annotations

from connector.offers import Offers
from connector.settings import ConnectorSettings
from connector.side_channel import Gone, RecvNoted, RecvReady
from connector.step import Lost
from pdq.wire.types import KvSource, Pair, pack_ids

PAIR = Pair(gen=1, attempt=2)
SETTINGS = ConnectorSettings(kv_lease_s=9.0, kv_answer_s=0.5, kv_answer_tries=3)
HERE = {"epoch": "p-1", "transfer_id": "r1", "pair": PAIR}
READY = RecvReady(
    **HERE,
    consumer="d-1",
    host="h",
    port=80,
    tp_size=1,
    block_size=16,
    num_tokens=16,
    first_block=0,
    block_ids=pack_ids([1]),
)
RANK_0, RANK_1 = "tcp://h:70", "tcp://h:71"


def offering(tp_size: int = 1, *, is_once: bool = False) -> Offers:
    offers = Offers(SETTINGS, consumer="d-1")
    source = KvSource(engine_id="p", epoch="p-1", host="h", port=70, tp_size=tp_size, block_size=16)
    offers.start("e1", source, READY, 0.0, is_once=is_once)
    return offers


def test_who_has_heard_it_is_told_again_each_third_of_a_lease():
    offers = offering(tp_size=2)

    first = offers.tick(0.0)
    for rank in (RANK_0, RANK_1):
        offers.on_message(rank, RecvNoted(**HERE), 0.1)
    early, second = offers.tick(3.0), offers.tick(3.2)

    assert first == second == [(RANK_0, READY), (RANK_1, READY)]
    assert early == []


def test_who_has_not_is_told_again_soon():
    offers = offering(tp_size=2)
    offers.tick(0.0)
    offers.on_message(RANK_0, RecvNoted(**HERE), 0.1)

    assert offers.tick(0.4) == []
    assert offers.tick(0.5) == [(RANK_1, READY)]


def test_a_rank_that_dies_while_it_writes_is_given_up_after_as_many_tries_as_any_peer():
    offers = offering(tp_size=2)
    offers.tick(0.0)
    for rank in (RANK_0, RANK_1):
        offers.on_message(rank, RecvNoted(**HERE), 0.1)
    for now in (3.2, 3.7, 4.2):
        assert (RANK_1, READY) in offers.tick(now)
        offers.on_message(RANK_0, RecvNoted(**HERE), now)
    assert offers.take_lost() == []

    assert offers.tick(4.7) == []

    assert offers.take_lost() == [Lost("e1", "P has not answered 3 times", is_silent=True)]
    assert offers.take_lost() == []
    assert offers.next_at() is None


def test_answers_keep_a_push_waiting():
    offers = offering()
    for now in range(60):
        offers.tick(float(now))
        offers.on_message(RANK_0, RecvNoted(**HERE), now + 0.1)

    assert offers.take_lost() == []


def test_gone_of_one_rank_loses_the_push_once():
    offers = offering(tp_size=2)
    offers.tick(0.0)
    for rank in (RANK_1, RANK_0):
        offers.on_message(rank, Gone(**HERE, reason="released"), 0.1)

    assert offers.take_lost() == [Lost("e1", "P says gone: released", is_silent=False)]
    assert offers.tick(9.0) == []


def test_that_nothing_is_missing_is_told_until_all_have_heard_it_and_never_lost():
    heard, silent = offering(is_once=True), offering(is_once=True)
    heard.tick(0.0)
    heard.on_message(RANK_0, RecvNoted(**HERE), 0.1)

    assert heard.next_at() is None
    assert sum(len(silent.tick(now / 2)) for now in range(20)) == 3
    assert silent.take_lost() == []
