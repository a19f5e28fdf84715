"""vLLM's steps as EngineOutputs; `released` exactly once, whoever says it first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connector.params import params_from_ticket
from engine.base import EngineOutput, LoadKv, PrefillOnly, PushKv, ReceiveKv
from engine.vllm.requests import OpenRequests, State
from pdq.wire.types import TokenLogprob, TransferStats, pack_ids, unpack_ids
from tests.vllm_adapter.core_outputs import SOURCE, TICKET, Rows, output, request

ID = "r1:1:2"
KINDS = [PrefillOnly(), PushKv(), LoadKv(ticket=TICKET), ReceiveKv(source=SOURCE)]


@pytest.fixture
def requests() -> OpenRequests:
    return OpenRequests()


def outputs_of(requests: OpenRequests) -> tuple[EngineOutput, ...]:
    return requests.take_news().outputs


def test_each_steps_tokens_come_out_and_the_end_says_how(requests):
    requests.add(request())
    requests.on_step([output(11)], None)
    requests.on_step([output(12, 13)], None)
    requests.on_step([output(2, finish="stop", stop_reason=2)], None)

    first, second, last = outputs_of(requests)

    assert [unpack_ids(one.token_ids) for one in (first, second, last)] == [[11], [12, 13], [2]]
    assert (first.finish, last.finish, last.stop_token_id) == (None, "stop", 2)


def test_an_end_by_length_has_no_stop_token(requests):
    requests.add(request())
    requests.on_step([output(11, finish="length")], None)

    (last,) = outputs_of(requests)

    assert (last.finish, last.stop_token_id) == ("length", None)


def test_without_a_connector_the_end_releases(requests):
    requests.add(request())
    requests.on_step([output(11)], None)
    assert requests.take_news().released == ()
    requests.on_step([output(12, finish="length")], None)

    assert requests.take_news().released == (ID,)
    assert requests.counts() == (0, 0)


def test_with_a_connector_it_says_when_blocks_are_free(requests):
    requests.add(request(LoadKv(ticket=TICKET)))
    requests.on_step([output(12, finish="length")], None)
    assert requests.take_news().released == ()

    requests.on_step([], {"released": [ID]})
    requests.on_step([], {"released": [ID, "somebody else's"]})

    assert requests.take_news().released == (ID,)


@pytest.mark.parametrize("kv", KINDS)
def test_released_before_the_end_was_heard_counts_after_it(requests, kv):
    requests.add(request(kv))
    requests.on_step([], {"released": [ID]})
    assert requests.take_news().released == ()
    requests.on_step([output(12, finish="length", kv_transfer_params=params_from_ticket(TICKET))], None)

    assert requests.take_news().released == (ID,)


def test_a_pulled_prefill_ends_with_its_ticket_and_stays_pinned(requests):
    requests.add(request(PrefillOnly()))
    stats = SimpleNamespace(num_local_cached_tokens=4)
    requests.on_step(
        [output(99, finish="length", kv_transfer_params=params_from_ticket(TICKET), prefill_stats=stats)], None
    )

    (prefilled,) = outputs_of(requests)

    assert prefilled == EngineOutput(engine_request_id=ID, finish="prefilled", ticket=TICKET, cached_tokens=4)
    assert requests.counts() == (0, 1)


def test_a_pushed_prefill_has_no_ticket(requests):
    requests.add(request(PushKv()))
    requests.on_step([output(99, finish="stop")], None)

    assert outputs_of(requests) == (EngineOutput(engine_request_id=ID, finish="prefilled"),)


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}])
def test_a_pulled_prefill_without_a_ticket_is_an_error(requests, params):
    requests.add(request(PrefillOnly()))
    requests.on_step([output(99, finish="length", kv_transfer_params=params)], {"failed": {ID: "kv params: bad"}})

    (failed,) = outputs_of(requests)

    assert failed.error == "engine_error: kv params: bad"


def test_a_failed_load_says_why(requests):
    requests.add(request(LoadKv(ticket=TICKET)))
    requests.on_step([output(finish="error")], {"failed": {ID: "p1 is gone"}, "released": [ID]})

    news = requests.take_news()

    assert news.outputs == (EngineOutput(engine_request_id=ID, error="kv_transfer_failed: p1 is gone"),)
    assert news.released == (ID,)


def test_a_reason_that_came_a_step_earlier_is_not_forgotten(requests):
    requests.add(request(LoadKv(ticket=TICKET)))
    requests.on_step([], {"failed": {ID: "p1 is gone"}})
    requests.on_step([output(finish="error")], None)

    assert outputs_of(requests)[0].error == "kv_transfer_failed: p1 is gone"


@pytest.mark.parametrize(("finish", "named"), [("error", "with an error"), ("abort", "aborted")])
def test_an_end_that_nobody_asked_for_is_an_engine_error(requests, finish, named):
    requests.add(request())
    requests.on_step([output(finish=finish)], None)

    (failed,) = outputs_of(requests)

    assert failed.error is not None
    assert failed.error.startswith("engine_error: ")
    assert named in failed.error


def test_what_the_transfer_cost_comes_with_the_end(requests):
    requests.add(request(LoadKv(ticket=TICKET)))
    cost = {"num_bytes": 10, "num_descriptors": 2, "seconds": 0.5, "hidden_seconds": 0.1}
    requests.on_step([], {"transfers": {ID: cost, "unknown": cost}})
    requests.on_step([output(11)], None)
    requests.on_step([output(12, finish="length")], None)

    first, last = outputs_of(requests)

    assert first.transfer is None
    assert last.transfer == TransferStats(num_bytes=10, num_descriptors=2, seconds=0.5, hidden_seconds=0.1)


def test_log_probabilities_are_cut_to_what_this_request_wants(requests):
    requests.add(request(logprobs=1))
    lists = (Rows([7, 3, 4]), Rows([-0.5, -0.25, -1.0]), Rows([2]))
    requests.on_step([output(7, new_logprobs=lists)], None)

    (one,) = outputs_of(requests)

    assert one.logprobs == (TokenLogprob(token_id=7, logprob=-0.5, top_ids=(3,), top_logprobs=(-0.25,)),)


def test_prompt_log_probabilities_of_all_chunks_come_once_and_end_where_the_prompt_does(requests):
    requests.add(request(PrefillOnly(), prompt=(1, 2, 3), generated=(4, 5), prompt_logprobs=0))
    requests.on_step([output(new_prompt_logprobs_tensors=(Rows([2], [3]), Rows([-1.0], [-2.0]), Rows(1, 1)))], None)
    more = (Rows([4], [5]), Rows([-3.0], [-4.0]), Rows(1, 1))
    params = params_from_ticket(TICKET)
    requests.on_step([output(9, finish="length", new_prompt_logprobs_tensors=more, kv_transfer_params=params)], None)

    (prefilled,) = outputs_of(requests)

    assert prefilled.prompt_logprobs == (
        None,
        TokenLogprob(token_id=2, logprob=-1.0),
        TokenLogprob(token_id=3, logprob=-2.0),
    )


def test_a_prompt_of_one_token_has_one_position_without_a_value(requests):
    requests.add(request(prompt=(1,), prompt_logprobs=0))
    requests.on_step([output(9)], None)
    requests.on_step([output(9)], None)

    first, second = outputs_of(requests)

    assert (first.prompt_logprobs, second.prompt_logprobs) == ((None,), None)


@pytest.mark.parametrize("kv", [LoadKv(ticket=TICKET), ReceiveKv(source=SOURCE)])
def test_a_decode_worker_reports_no_prompt_log_probabilities(requests, kv):
    requests.add(request(kv, prompt_logprobs=2))
    requests.on_step([output(9)], None)

    assert outputs_of(requests)[0].prompt_logprobs is None


def test_preemptions_are_counted(requests):
    requests.add(request())
    requests.on_step([output(9, events=[SimpleNamespace(type=2), SimpleNamespace(type=3)])], None)

    assert requests.num_preemptions == 1


def test_an_aborted_request_says_nothing_more(requests):
    requests.add(request())

    assert requests.abort(ID) is State.OPEN
    requests.on_step([output(11), output(finish="abort")], None)

    news = requests.take_news()
    assert (news.outputs, news.released) == ((), (ID,))
    assert requests.abort(ID) is None


def test_an_aborted_request_with_kv_is_released_when_the_connector_says_so(requests):
    requests.add(request(ReceiveKv(source=SOURCE)))
    requests.abort(ID)
    assert not requests.has_news
    assert requests.abort(ID) is State.ABORTED

    requests.on_step([], {"released": [ID]})

    assert requests.take_news().released == (ID,)


def test_a_prefill_that_ended_before_vllm_heard_of_its_abort_is_unwanted(requests):
    requests.add(request(PrefillOnly()))
    requests.abort(ID)
    requests.on_step([output(9, finish="length", kv_transfer_params=params_from_ticket(TICKET))], None)

    assert outputs_of(requests) == ()
    assert requests.take_unwanted() == [ID]
    assert requests.take_unwanted() == []
    assert requests.finished_prefill(ID) is not None


def test_an_aborted_prefill_that_vllm_did_abort_is_not_unwanted(requests):
    requests.add(request(PrefillOnly()))
    requests.abort(ID)
    requests.on_step([output(finish="abort")], {"released": [ID]})

    assert requests.take_unwanted() == []
    assert requests.take_news().released == (ID,)


def test_only_finished_prefills_can_be_released(requests):
    requests.add(request(PrefillOnly()))
    requests.add(request(LoadKv(ticket=TICKET), name="r2"))
    requests.on_step([output(9, name="r2", finish="length")], None)
    assert requests.finished_prefill(ID) is None
    assert requests.finished_prefill("r2:1:2") is None

    requests.on_step([output(9, finish="length", kv_transfer_params=params_from_ticket(TICKET))], None)

    assert requests.finished_prefill(ID) is not None
    requests.on_step([], {"released": [ID]})
    assert requests.finished_prefill(ID) is None


def test_an_id_that_is_still_here_is_not_taken_twice(requests):
    assert requests.add(request(LoadKv(ticket=TICKET)))
    requests.abort(ID)

    assert not requests.add(request(LoadKv(ticket=TICKET)))


def test_a_refused_request_ends_with_the_reason_and_holds_nothing(requests):
    requests.add(request())
    requests.refuse(ID, "engine_error: too long")

    news = requests.take_news()

    assert news.outputs == (EngineOutput(engine_request_id=ID, error="engine_error: too long"),)
    assert news.released == (ID,)
    assert requests.counts() == (0, 0)


def test_tokens_are_packed_as_everywhere(requests):
    requests.add(request())
    requests.on_step([output(70000)], None)

    assert outputs_of(requests)[0].token_ids == pack_ids((70000,))
