"""Requests through two vLLM engines with the plugin, in both modes and over both generations of hooks."""

from __future__ import annotations

from types import ModuleType

import pytest

from connector.memory_transport import MemoryFabric
from tests.connector_plugin.fake_engine import FakeEngine
from tests.connector_plugin.pairs import continuation, engines

PROMPT = list(range(100, 130))
"""30 tokens, 7.5 blocks, two steps."""


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("tp_sizes", [(1, 1), (2, 2), (2, 1)], ids=["tp1", "tp2", "tp2-tp1"])
def test_decode_goes_on_from_the_kv_of_the_prefill(plugin: ModuleType, push: bool, tp_sizes: tuple[int, int]) -> None:
    with engines(plugin, tp_sizes=tp_sizes) as pair:
        pair.prefill("a", PROMPT, push=push)
        if not push:
            pair.run(lambda: pair.end("p-a") is not None)
        pair.decode("a", PROMPT, push=push)
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        assert pair.d.news["transfers"]["d-a"]["num_bytes"] == 8 * 4 * 2 * 2 * 2 * 4
        assert "failed" not in pair.d.news
        pair.check_all_is_free()


def test_a_proxy_that_knows_only_vllms_own_keys_can_hand_a_prefill_over(plugin: ModuleType) -> None:
    """It passes on what P answered."""
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, params={"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None})
        pair.run(lambda: pair.end("p-a") is not None)
        pair.decode("a", PROMPT, params=pair.ticket("a"))
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()


def test_requests_without_kv_params_pass_by_the_connector(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        pair.decode_here("a", PROMPT)
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        assert pair.d.news["released"] == ["d-a"]
        assert "transfers" not in pair.d.news


def test_prefills_and_decodes_run_side_by_side(plugin: ModuleType) -> None:
    """Both modes on one pair of engines, some with a common prefix."""
    prompts = {
        name: [*PROMPT[: 4 * index], *range(500 * index, 500 * index + 9)] for index, name in enumerate("abcdef", 1)
    }
    with engines(plugin, num_blocks=80) as pair:
        for name, ids in prompts.items():
            pair.prefill(name, ids, push=name in "ace")
        for name in "ace":
            pair.decode(name, prompts[name], push=True)
        pair.run(lambda: all(pair.end(f"p-{name}") for name in "bdf"))
        for name in "bdf":
            pair.decode(name, prompts[name])
        pair.run_until_idle()

        for name, ids in prompts.items():
            assert pair.end(f"d-{name}") == ("FINISHED_LENGTH_CAPPED", continuation(ids, 4))
        assert pair.d.news["transfers"].keys() == {f"d-{name}" for name in prompts}
        pair.check_all_is_free()


def test_a_side_channel_port_that_is_taken_names_the_setting(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        port = pair.p.config.kv_transfer_config.kv_port

        with pytest.raises(OSError, match=f"{port}.*kv_port"):
            FakeEngine(plugin, MemoryFabric(), role="kv_producer", port=port, settings={})
