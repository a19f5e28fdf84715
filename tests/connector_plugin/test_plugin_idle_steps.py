"""A step that computes nothing lasts until KV that is under way has arrived, instead of turning vLLM's loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from connector.vllm_plugin import worker
from connector.vllm_plugin.news import PluginStep
from tests.connector_plugin.pairs import LIMIT_S, PATIENT, continuation, engines

PROMPT = list(range(100, 130))


@pytest.fixture
def may_wait(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Per role, of each step. Steps that may wait do so for longer than the test, unless they are woken."""
    flags: dict[str, list[bool]] = {"producer": [], "consumer": []}
    bind = worker.PluginWorker.bind

    def noting(self: worker.PluginWorker, step: PluginStep) -> None:
        flags[self._settings.role].append(step.may_wait)
        bind(self, step)

    monkeypatch.setattr(worker, "_IDLE_STEP_S", 2 * LIMIT_S)
    monkeypatch.setattr(worker.PluginWorker, "bind", noting)
    return flags


def test_both_engines_sleep_until_the_read_has_ended(plugin: ModuleType, may_wait: dict[str, list[bool]]) -> None:
    with engines(plugin) as pair, ThreadPoolExecutor() as pool:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None, pair.p)
        assert not any(may_wait["producer"]), "it was computing"
        sleeping = pool.submit(pair.run, lambda: not pair.p.scheduler.has_requests(), pair.p)
        pair.decode("a", PROMPT)
        pair.run(lambda: pair.end("d-a") is not None, pair.d)
        sleeping.result(LIMIT_S)

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        for role, flags in may_wait.items():
            assert 1 <= sum(flags) <= 2, f"{role}: once, and where the former generation announces what it reports"
        pair.run_until_idle()
        pair.check_all_is_free()


@pytest.mark.usefixtures("may_wait")
def test_a_load_that_fails_ends_the_step_as_well(plugin: ModuleType) -> None:
    with engines(plugin, d_settings=PATIENT | {"kv_wait_s": 1.0, "kv_answer_tries": 8}) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None, pair.p)
        pair.decode("a", PROMPT)  # P has not taken another step, in which the prefill would be pinned
        pair.run(lambda: "failed" in pair.d.news, pair.d)

        assert list(pair.d.news["failed"]) == ["d-a"]


def test_an_engine_without_kv_under_way_never_waits(plugin: ModuleType, may_wait: dict[str, list[bool]]) -> None:
    with engines(plugin) as pair:
        pair.decode_here("a", PROMPT)
        pair.run_until_idle()

        assert may_wait["consumer"]
        assert not any(may_wait["consumer"])
