"""Every way in which a request can end while KV is under way: blocks come back once, the other side learns of it."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.connector_plugin.pairs import PATIENT, Engines, continuation, engines

PROMPT = list(range(100, 130))
push_or_pull = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


def prefilled(pair: Engines, name: str = "a") -> None:
    pair.prefill(name, PROMPT)
    pair.run(lambda: pair.end(f"p-{name}") is not None, pair.p)


@push_or_pull
def test_d_is_aborted_before_it_was_scheduled(plugin: ModuleType, push: bool) -> None:
    with engines(plugin) as pair:
        if push:
            pair.prefill("a", PROMPT, push=True)
            pair.p.turn()  # a push that is cancelled before P has begun it waits for another reader
        else:
            prefilled(pair)
        pair.decode("a", PROMPT, push=push)
        pair.abort(pair.d, "d-a")
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_ABORTED", [])
        pair.check_all_is_free()


@push_or_pull
def test_d_refuses_a_request_before_it_reaches_the_engine(plugin: ModuleType, push: bool) -> None:
    """vLLM's API process then submits a request that is aborted at once, to let the connector release P."""
    with engines(plugin) as pair:
        if push:
            pair.prefill("a", PROMPT, push=True)
            pair.p.turn()  # a push that is cancelled before P has begun it waits for another reader
        else:
            prefilled(pair)
        pair.decode("a", [0], push=push, abort_immediately=True)
        pair.run_until_idle()

        pair.check_all_is_free()


def test_d_is_aborted_while_it_reads(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        prefilled(pair)
        transport = pair.d.ranks[0].transport
        transport.gate.clear()
        pair.decode("a", PROMPT)
        pair.run(transport.reading.is_set, pair.d)
        pair.abort(pair.d, "d-a")
        for _ in range(5):
            pair.d.turn()
        pool = pair.d.scheduler.pool
        assert pool.num_free < pool.num_blocks - 1  # the read may still write into them
        transport.gate.set()
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_ABORTED", [])
        assert "failed" not in pair.d.news
        pair.check_all_is_free()


def test_d_is_aborted_while_p_writes(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        transport = pair.p.ranks[0].transport
        transport.write_gate.clear()
        pair.decode("a", PROMPT, push=True)
        pair.d.turn()
        pair.prefill("a", PROMPT, push=True)
        pair.run(transport.writing.is_set)
        pair.abort(pair.d, "d-a")
        for _ in range(5):
            pair.d.turn()
        pool = pair.d.scheduler.pool
        assert pool.num_free < pool.num_blocks - 1
        transport.write_gate.set()
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_ABORTED", [])
        pair.check_all_is_free()


def test_d_is_aborted_between_the_end_of_its_load_and_its_first_step(plugin: ModuleType) -> None:
    """Its blocks are free at once then: nothing is awaited any more."""
    with engines(plugin) as pair:
        prefilled(pair)
        pair.decode("a", PROMPT)
        loaded = pair.d.scheduler._finished_recving
        pair.run(lambda: bool(loaded))
        pair.abort(pair.d, "d-a")
        pair.run_until_idle()

        pair.check_all_is_free()


def test_d_is_aborted_while_the_step_runs_that_reports_its_load(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        prefilled(pair)
        pair.decode("a", PROMPT)
        for _ in range(20):
            pair.d.step(meanwhile=lambda: pair.abort(pair.d, "d-a"))
        pair.run_until_idle()

        pair.check_all_is_free()


def test_d_is_aborted_while_it_decodes(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        prefilled(pair)
        pair.decode("a", PROMPT, max_tokens=50)
        pair.run(lambda: any(len(r.ids) > len(PROMPT) for r in pair.d.scheduler.requests.values()))
        pair.abort(pair.d, "d-a")
        pair.run_until_idle()

        pair.check_all_is_free()


@push_or_pull
def test_p_is_aborted_in_mid_prefill_and_d_learns_of_it(plugin: ModuleType, push: bool) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.p.turn()
        if push:
            pair.decode("a", PROMPT, push=True)
            pair.d.turn()
        pair.abort(pair.p, "p-a")
        pair.run_until_idle()

        assert pair.end("p-a") == ("FINISHED_ABORTED", [])
        if push:
            assert pair.end("d-a") == ("FINISHED_ERROR", [])
            assert pair.d.news["failed"]["d-a"]
        pair.check_all_is_free()


@push_or_pull
def test_p_is_aborted_while_queued(plugin: ModuleType, push: bool) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.abort(pair.p, "p-a")
        pair.run_until_idle()

        pair.check_all_is_free()


def test_p_is_aborted_while_it_writes(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        transport = pair.p.ranks[0].transport
        transport.write_gate.clear()
        pair.decode("a", PROMPT, push=True)
        pair.d.turn()
        pair.prefill("a", PROMPT, push=True)
        pair.run(transport.writing.is_set)
        pair.abort(pair.p, "p-a")
        for _ in range(5):
            pair.p.turn()
        if (end := pair.end("p-a")) == ("FINISHED_ABORTED", []):
            pool = pair.p.scheduler.pool
            assert pool.num_free < pool.num_blocks - 1  # the call in flight reads them
        transport.write_gate.set()
        pair.run_until_idle()

        assert end is not None
        pair.check_all_is_free()


def test_an_abort_of_a_finished_prefill_is_ignored_and_d_still_reads_it(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        prefilled(pair)
        pair.abort(pair.p, "p-a")
        pair.decode("a", PROMPT)
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()


@push_or_pull
def test_a_finished_prefill_is_released(plugin: ModuleType, push: bool) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.run(lambda: pair.end("p-a") is not None, pair.p)
        assert "released" not in pair.p.news
        pair.release("a")
        pair.release("unknown")
        pair.run_until_idle()
        pair.release("a")
        pair.run_until_idle()

        pair.check_all_is_free()


def test_a_prefill_that_nobody_reads_is_freed_when_its_time_is_over(plugin: ModuleType) -> None:
    with engines(plugin, p_settings=PATIENT | {"kv_hold_s": 0.2}) as pair:
        prefilled(pair)
        pair.run_until_idle()

        pair.check_all_is_free()


def test_a_prefill_that_ends_with_its_first_token_is_handed_over_too(plugin: ModuleType) -> None:
    """The first token was EOS: vLLM says STOPPED, not LENGTH_CAPPED."""
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT)
        request = next(iter(pair.p.scheduler.requests.values()))
        pair.run(lambda: request.num_computed_tokens >= 16, pair.p)
        while not request.is_finished:
            pair.p.scheduler.schedule()
            request.num_computed_tokens = len(PROMPT)
            request.status = type(request.status)["FINISHED_STOPPED"]
            pair.p.scheduler.running.remove(request)
            pair.p.scheduler._free(request)

        assert pair.ticket("a")["pdq_num_tokens"] == len(PROMPT)
        pair.release("a")
        pair.run_until_idle()
