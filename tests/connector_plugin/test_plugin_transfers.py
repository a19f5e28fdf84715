"""Requests through two vLLM engines with the plugin, in both modes and over both generations of hooks."""

from __future__ import annotations

from types import ModuleType

import pytest

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
