"""A transfer that fails: the request ends with an error, or is computed here, depending on vLLM's policy; once."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.connector_plugin.fake_vllm import KVConnectorOutput
from tests.connector_plugin.pairs import PATIENT, Engines, continuation, engines

PROMPT = list(range(100, 130))
push_or_pull = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
both_policies = pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])


def check_end(pair: Engines, recompute: bool, name: str = "a") -> None:
    if recompute:
        assert pair.end(f"d-{name}") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
    else:
        assert pair.end(f"d-{name}") == ("FINISHED_ERROR", [])
    assert pair.d.news["failed"][f"d-{name}"]
    pair.check_all_is_free()


@both_policies
def test_p_has_freed_the_blocks(plugin: ModuleType, recompute: bool) -> None:
    """On an engine that has nothing else to do: no other request brings it to a step."""
    with engines(plugin, recompute=recompute) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.release("a")
        pair.run_until_idle()
        pair.decode("a", PROMPT)
        pair.run_until_idle()

        check_end(pair, recompute)


@both_policies
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 2)], ids=["tp1", "tp2"])
def test_a_read_fails(plugin: ModuleType, recompute: bool, tp_sizes: tuple[int, int]) -> None:
    with engines(plugin, recompute=recompute, tp_sizes=tp_sizes) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.d.ranks[-1].transport.fail_reads = 100
        pair.decode("a", PROMPT)
        pair.run(lambda: pair.end("d-a") is not None)
        pair.release("a")  # kept for a second try, until its lease ends
        pair.run_until_idle()

        check_end(pair, recompute)


NOT_BEGUN = {"kv_wait_s": 0.5, "kv_answer_tries": 8}


@both_policies
def test_p_never_begins(plugin: ModuleType, recompute: bool) -> None:
    with engines(plugin, recompute=recompute, p_settings=PATIENT | NOT_BEGUN) as pair:
        pair.decode("a", PROMPT, push=True)
        pair.run_until_idle()

        check_end(pair, recompute)


@both_policies
@push_or_pull
def test_p_is_gone(plugin: ModuleType, recompute: bool, push: bool) -> None:
    settings = PATIENT | {"kv_lease_s": 0.6, "kv_wait_s": 0.9, "kv_answer_tries": 4}
    with engines(plugin, recompute=recompute, d_settings=settings) as pair:
        pair.prefill("a", PROMPT, push=push)
        if not push:
            pair.run(lambda: pair.end("p-a") is not None)
        pair.p.close()
        pair.decode("a", PROMPT, push=push)
        pair.run(lambda: not pair.d.scheduler.has_requests(), pair.d)

        assert pair.end("d-a") is not None
        assert pair.d.news["failed"]["d-a"]
        assert pair.d.news["released"] == ["d-a"]


def test_after_a_failure_p_is_not_asked_again(plugin: ModuleType) -> None:
    """Also when the request is preempted and starts over."""
    with engines(plugin, recompute=True, d_num_blocks=16) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.d.ranks[0].transport.fail_reads = 100
        pair.decode("a", PROMPT, max_tokens=20)
        pair.decode_here("b", list(range(300, 330)), max_tokens=20)
        pair.run(lambda: "failed" in pair.d.news)
        num_calls = len(pair.d.ranks[0].transport.calls)
        pair.run(lambda: pair.end("d-a") is not None)
        pair.release("a")
        pair.run_until_idle()

        assert pair.d.scheduler.num_preemptions > 0
        assert len(pair.d.ranks[0].transport.calls) == num_calls
        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 20))
        pair.check_all_is_free()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"pdq_port": 70000}, "pdq_port"),
    ({"pdq_block_ids": [1, 2]}, "pdq_block_ids"),
    ({"pdq_transfer_id": 7}, "pdq_transfer_id"),
    ({"do_remote_decode": True}, "both set"),
]


@both_policies
def test_bad_kv_params_fail_the_request_and_not_the_engine(plugin: ModuleType, recompute: bool) -> None:
    with engines(plugin, recompute=recompute, num_blocks=60) as pair:
        names = [f"r{index}" for index in range(len(BAD))]
        for name in names:
            pair.prefill(name, PROMPT)
        pair.run(lambda: all(pair.end(f"p-{name}") for name in names))
        for name, (change, _) in zip(names, BAD, strict=True):
            pair.decode(name, PROMPT, params=pair.ticket(name) | change)
        pair.run(lambda: all(pair.end(f"d-{name}") for name in names))
        for name in names:
            pair.release(name)
        pair.run_until_idle()

        for name, (_, reason) in zip(names, BAD, strict=True):
            assert reason in pair.d.news["failed"][f"d-{name}"]
            check_end(pair, recompute, name)


def test_bad_kv_params_of_a_request_that_is_aborted_in_mid_step(plugin: ModuleType) -> None:
    """The former hooks report the failed load a step after the workers' news of its end."""
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.decode("a", PROMPT, params=pair.ticket("a") | {"pdq_port": 70000})
        pair.d.step(meanwhile=lambda: pair.abort(pair.d, "d-a"))
        pair.release("a")
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_ABORTED", [])
        pair.check_all_is_free()


def test_bad_kv_params_of_a_prefill_give_no_ticket(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, params={"do_remote_decode": True, "pdq_transfer_id": "a", "pdq_gen": -1})
        pair.prefill("b", PROMPT, params={"do_remote_prefill": True, "pdq_transfer_id": "b"})
        pair.run_until_idle()

        assert pair.end("p-a") is not None
        assert "pdq_gen" in pair.p.news["failed"]["p-a"]
        assert pair.end("p-b") == ("FINISHED_ERROR", [])
        pair.check_all_is_free()


def test_the_pulling_connector_says_that_it_does_not_push(plugin: ModuleType) -> None:
    with engines(plugin, connector="PdqMooncakeConnector") as pair:
        pair.decode("a", PROMPT, push=True)
        pair.run_until_idle()

        assert "PdqMooncakeLayerwiseConnector" in pair.d.news["failed"]["d-a"]
        check_end(pair, False)


def test_reports_that_nobody_waits_for_never_reach_vllm(plugin: ModuleType) -> None:
    """Each would kill its engine core."""
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT)
        output = KVConnectorOutput(finished_sending={"x", *pair.p.scheduler.requests}, finished_recving={"y"})

        pair.p.scheduler.connector.update_connector_output(output)

        assert (output.finished_sending, output.finished_recving) == (set(), set())
        pair.abort(pair.p, "p-a")
        pair.run_until_idle()
        pair.check_all_is_free()


def test_a_connector_that_can_not_give_blocks_back_says_so_once(plugin: ModuleType) -> None:
    with engines(plugin, d_settings=PATIENT | {"kv_quarantine_s": 0.1}) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        transport = pair.d.ranks[0].transport
        transport.fail_reads, transport.fail_fences = 1, 1000
        pair.decode("a", PROMPT)
        pair.run(lambda: "fatal" in pair.d.news)
        for _ in range(5):
            pair.d.step()

        assert sum("fatal" in news for news in pair.d.scheduler.news) == 1
