"""The scheduler half alone: what it tells its worker halves and what it lets through."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from connector.params import ParamsError, PullConsumer, PullProducer, params_of
from connector.scheduler_half import SchedulerHalf
from connector.settings import ConnectorSettings
from connector.step import StepMeta, TransferResults
from pdq.wire.types import KvTicket, Pair, pack_ids

PAIR = Pair(gen=1, attempt=1)


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    made = make("both")
    yield made
    made.shutdown()
    made.shutdown()  # idempotent


def make(role: str) -> SchedulerHalf:
    return SchedulerHalf(
        ConnectorSettings(kv_answer_s=0.05),
        engine_id="e",
        epoch="e-1",
        host="127.0.0.1",
        side_channel_port=7000,
        tp_size=1,
        block_size=16,
        role=role,  # type: ignore[arg-type]
    )


def consumer_params(num_tokens: int = 40, block_size: int = 16) -> dict[str, object]:
    ticket = KvTicket(
        transfer_id="r1",
        pair=PAIR,
        engine_id="p",
        epoch="p-1",
        host="127.0.0.1",
        port=9,
        tp_size=1,
        block_size=block_size,
        num_tokens=num_tokens,
        block_ids=pack_ids(range(-(-num_tokens // block_size))),
    )
    return params_of(PullConsumer(ticket=ticket))


PRODUCER = params_of(PullProducer(transfer_id="r1", pair=PAIR))


def test_asking_for_tokens_changes_nothing(half):
    half.on_new_request("d1", consumer_params(), 40)

    answers = [half.get_num_new_matched_tokens("d1", 40, 16) for _ in range(3)]

    assert answers == [(24, True)] * 3
    assert half.build_connector_meta() == StepMeta()


def test_a_request_without_params_is_none_of_our_business(half):
    half.on_new_request("x", None, 40)

    assert half.get_num_new_matched_tokens("x", 40, 0) == (0, False)
    half.update_state_after_alloc("x", [1, 2, 3], 0)
    assert half.request_finished("x", [1, 2, 3], "stop") == (False, None)
    assert half.build_connector_meta() == StepMeta()


def test_a_load_is_told_once_and_then_never_asked_for_again(half):
    half.on_new_request("d1", consumer_params(), 40)
    half.update_state_after_alloc("d1", [4, 5, 6, 7], 24)
    assert half.has_pending_meta()

    meta = pickle.loads(pickle.dumps(half.build_connector_meta()))

    assert [(load.block_ids, load.first_block) for load in meta.loads] == [((4, 5, 6), 1)]
    assert half.build_connector_meta() == StepMeta()
    assert half.get_num_new_matched_tokens("d1", 40, 0) == (0, False)
    half.update_connector_output(TransferResults(finished_recving=frozenset({"d1"})))
    half.update_state_after_alloc("d1", [4, 5, 6, 7], 0)  # vLLM calls again after the load
    assert half.build_connector_meta() == StepMeta()
    assert half.get_num_new_matched_tokens("d1", 40, 0) == (0, False)  # also after a preemption


def test_the_ticket_names_the_blocks_of_the_prompt_only(half):
    half.on_new_request("p1", PRODUCER, 33)
    half.update_state_after_alloc("p1", [7, 8, 9], 0)
    half.update_state_after_alloc("p1", [7, 8, 9], 0)  # again after a preemption

    delay, params = half.request_finished("p1", [7, 8, 9, 10], "prefilled")

    assert delay
    assert params is not None
    assert params["pdq_block_ids"] == [7, 8, 9]
    assert (params["pdq_port"], params["pdq_epoch"], params["pdq_num_tokens"]) == (7000, "e-1", 33)
    meta = half.build_connector_meta()
    assert ([entry.engine_request_id for entry in meta.expected], meta.pinned) == (["p1"], ("p1",))


@pytest.mark.parametrize(("finish", "block_ids"), [("aborted", [7, 8, 9]), ("error", [7]), ("prefilled", [7, 8])])
def test_a_prefill_without_complete_kv_pins_nothing(half, finish, block_ids):
    half.on_new_request("p1", PRODUCER, 33)
    half.update_state_after_alloc("p1", [7, 8, 9], 0)

    assert half.request_finished("p1", block_ids, finish) == (False, None)
    assert half.build_connector_meta().forgotten == ("p1",)


def test_release_of_unknown_or_unfinished_requests_is_ignored(half):
    half.release("nobody")
    half.on_new_request("p1", PRODUCER, 16)
    half.update_state_after_alloc("p1", [7], 0)
    half.release("p1")

    assert half.build_connector_meta().released == ()


def test_reported_ids_that_nobody_waits_for_are_dropped(half):
    half.on_new_request("p1", PRODUCER, 16)
    half.update_state_after_alloc("p1", [7], 0)
    half.request_finished("p1", [7], "prefilled")
    report = TransferResults(finished_sending=frozenset({"p1", "x"}), finished_recving=frozenset({"y"}))

    first, second = half.update_connector_output(report), half.update_connector_output(report)

    assert (first.finished_sending, first.finished_recving) == ({"p1"}, frozenset())
    assert (second.finished_sending, second.finished_recving) == (frozenset(), frozenset())


def test_an_abort_while_loading_cancels_and_is_forgotten_after_the_report(half):
    half.on_new_request("d1", consumer_params(), 40)
    half.update_state_after_alloc("d1", [4, 5, 6], 40)

    assert half.request_finished("d1", [4, 5, 6], "aborted") == (False, None)
    meta = half.build_connector_meta()
    passed = half.update_connector_output(TransferResults(finished_recving=frozenset({"d1"})))

    assert (len(meta.loads), meta.cancelled) == (1, ("d1",))
    assert passed.finished_recving == {"d1"}


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        (consumer_params(block_size=32), 40, "block size 32 at P, 16 here"),
        (consumer_params(num_tokens=40), 39, "P has KV of 40 tokens, the request has 39"),
    ],
)
def test_a_ticket_that_does_not_fit_fails_its_load_only(half, params, num_tokens, reason):
    half.on_new_request("d1", params, num_tokens)
    external, _ = half.get_num_new_matched_tokens("d1", num_tokens, 0)
    half.update_state_after_alloc("d1", [4, 5, 6], external)

    assert half.build_connector_meta().loads[0].failed == reason


@pytest.mark.parametrize(("role", "params"), [("producer", consumer_params()), ("consumer", PRODUCER)])
def test_params_for_the_other_role_are_refused(role, params):
    half = make(role)

    with pytest.raises(ParamsError):
        half.on_new_request("x", params, 40)
    half.shutdown()
