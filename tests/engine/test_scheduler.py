"""The scheduler against scripted transfers: what is held when, and that every request ends once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector.step import TransferResults
from engine.embedded.request import TRANSITIONS, Event, IllegalTransition, State
from tests.engine.scheduler_rig import EOS, SETTINGS, Rig


def test_a_request_that_loads_holds_its_blocks_and_computes_nothing():
    rig = Rig()
    rig.load("a", 10)

    assert rig.step() == 0

    assert rig.state("a") is State.WAITING_FOR_REMOTE_KVS
    assert rig.pool.num_free == 13
    assert rig.scheduler.counts() == (0, 1, 0)


def test_after_the_load_the_last_prompt_token_alone_is_computed():
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.transfers(rig.half.loaded("a:1:1"))

    assert rig.step() == 1
    assert rig.answers["a"].ids == [5]
    assert rig.half.calls == ["alloc a:1:1 10", "alloc a:1:1 0"]


def test_a_failed_load_ends_in_an_error_and_gives_its_blocks_back():
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.transfers(rig.half.loaded(failed={"a:1:1": "peer gone"}))

    assert rig.answers["a"].end.error == "kv_transfer_failed: peer gone"
    assert rig.answers["a"].num_released == 1
    assert rig.pool.num_free == 16


@pytest.mark.parametrize("is_failed", [False, True])
def test_an_abort_while_loading_frees_the_blocks_only_once_drained(is_failed: bool):
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.abort("a")
    rig.abort("a")
    assert rig.state("a") is State.DRAINING
    assert (rig.pool.num_free, rig.answers["a"].num_released) == (13, 0)

    rig.transfers(rig.half.loaded(failed={"a:1:1": "cancelled"}) if is_failed else rig.half.loaded("a:1:1"))
    assert (rig.pool.num_free, rig.answers["a"].num_released) == (16, 1)
    assert rig.answers["a"].end is None


def test_an_abort_between_load_and_next_step():
    rig = Rig()
    rig.load("a", 10)
    rig.step()
    rig.transfers(rig.half.loaded("a:1:1"))

    rig.abort("a")

    assert (rig.step(), rig.pool.num_free, rig.answers["a"].num_released) == (0, 16, 1)


def test_a_prefill_ends_pinned_until_it_is_sent():
    rig = Rig()
    rig.prefill("a", 20)

    assert (rig.step(), rig.step()) == (16, 4)

    answer = rig.answers["a"]
    assert (answer.end.finish, answer.ids) == ("prefilled", [])
    assert answer.end.ticket is not None
    assert rig.scheduler.counts() == (0, 0, 1)
    rig.scheduler.release("a:1:1")
    assert rig.pool.num_free == 11
    rig.transfers(rig.half.sent("a:1:1"))
    assert (rig.pool.num_free, answer.num_released) == (16, 1)
    assert rig.scheduler.counts() == (0, 0, 0)


def test_an_eos_as_first_token_does_not_disturb_a_prefill():
    rig = Rig()
    rig.prefill("a", 3)

    rig.step(token=EOS)

    assert rig.answers["a"].end.finish == "prefilled"


def test_a_prefill_that_does_not_fit_waits_for_pinned_blocks():
    rig = Rig(replace(SETTINGS, prefix_caching=False))
    rig.prefill("a", 40)
    for _ in range(3):
        rig.step()
    rig.prefill("b", 40)
    assert rig.step() == 0
    assert not rig.scheduler.can_compute

    rig.transfers(rig.half.sent("a:1:1"))

    assert rig.step() == 16


def test_one_that_is_undecided_lets_others_pass_and_keeps_its_place():
    rig = Rig()
    rig.half.undecided.add("a:1:1")
    rig.load("a", 10)
    rig.local("b", 4)
    rig.local("c", 4)

    assert rig.step() == 8
    assert rig.state("a") is State.WAITING
    rig.half.undecided.clear()
    rig.step()
    assert rig.state("a") is State.WAITING_FOR_REMOTE_KVS


def test_gone_kv_fails_a_waiting_request_at_once():
    rig = Rig(replace(SETTINGS, max_num_seqs=1))
    rig.local("busy", 4)
    rig.step()
    rig.load("a", 10)

    rig.scheduler.fail_gone({"a:1:1": "P restarted", "busy:1:1": "not this one", "nobody": "?"})
    rig.step()

    assert rig.answers["a"].end.error == "kv_transfer_failed: P restarted"
    assert rig.answers["a"].num_released == 1
    assert rig.answers["busy"].end is None


def test_ids_that_nobody_waits_for_are_dropped():
    rig = Rig()
    rig.local("a", 4)
    rig.step()

    ids = frozenset({"a:1:1", "nobody"})
    rig.transfers(TransferResults(finished_sending=ids, finished_recving=ids, failed_recving={"nobody": "x"}))

    assert rig.state("a") is State.RUNNING
    assert rig.answers["a"].num_released == 0


def test_loads_and_growth_together_cannot_lock_up():
    rig = Rig(replace(SETTINGS, num_blocks=10))
    names = [f"r{i}" for i in range(8)]
    for name in names:
        rig.load(name, 14, max_tokens=20)
    for _ in range(600):
        rig.step(results=rig.half.loaded(*rig.half.loading))

    assert [rig.answers[name].end.finish for name in names] == ["length"] * 8
    assert [rig.answers[name].num_released for name in names] == [1] * 8
    assert rig.pool.num_free == 10


def test_a_second_request_with_a_known_id_is_ignored():
    rig = Rig()
    rig.local("a", 4)
    rig.local("a", 8)

    assert rig.step() == 4


def test_illegal_events_raise():
    rig = Rig()
    rig.local("a", 4)
    rig.step()
    found = rig.scheduler._requests["a:1:1"]

    with pytest.raises(IllegalTransition, match="SENT in RUNNING"):
        found.on(Event.SENT)
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.FINISHED}
