"""What is in a prefix cache already is not moved; what has to be computed is."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.connector_plugin.fake_engine import BLOCK_SIZE
from tests.connector_plugin.pairs import Engines, continuation, engines

PROMPT = list(range(100, 130))
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 4
"""2 layers, 2 heads, 2 floats."""

push_or_pull = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


def through_both(pair: Engines, name: str, ids: list[int], *, push: bool, **decode: object) -> int:
    """Bytes moved."""
    pair.prefill(name, ids, push=push)
    pair.run(lambda: push or pair.end(f"p-{name}") is not None)
    pair.decode(name, ids, push=push, **decode)
    pair.run_until_idle()
    assert pair.end(f"d-{name}") == ("FINISHED_LENGTH_CAPPED", continuation(ids, 4))
    moved: int = pair.d.news.get("transfers", {}).get(f"d-{name}", {}).get("num_bytes", 0)
    return moved


@push_or_pull
def test_blocks_that_d_has_are_not_moved_again(plugin: ModuleType, push: bool) -> None:
    with engines(plugin, num_blocks=40) as pair:
        assert through_both(pair, "a", PROMPT, push=push) == 8 * BLOCK_BYTES
        longer = PROMPT[:16] + list(range(200, 214))

        assert through_both(pair, "b", longer, push=push) == 4 * BLOCK_BYTES
        pair.check_all_is_free()


@push_or_pull
def test_a_prompt_that_d_has_but_for_its_last_token_is_not_moved_at_all(plugin: ModuleType, push: bool) -> None:
    """That token's KV is computed in any case, since its logits are needed. P hears of it at once."""
    prompt = PROMPT[:29]  # 7 blocks and a token
    with engines(plugin, num_blocks=40) as pair:
        through_both(pair, "a", prompt, push=push)

        assert through_both(pair, "b", prompt, push=push) == 0
        pair.check_all_is_free()


@push_or_pull
def test_a_prefix_hit_at_p_is_moved_with_the_rest(plugin: ModuleType, push: bool) -> None:
    with engines(plugin, num_blocks=40) as pair:
        pair.prefill("warm", PROMPT)
        pair.run(lambda: pair.end("p-warm") is not None)
        pair.release("warm")
        pair.run_until_idle()

        assert through_both(pair, "a", PROMPT, push=push) == 8 * BLOCK_BYTES
        pair.check_all_is_free()


@push_or_pull
def test_prompts_of_any_length_arrive_whole(current_plugin: ModuleType, push: bool) -> None:
    with engines(current_plugin, budget=7) as pair:
        for length in (2, 3, 4, 5, 16, 17, 31, 32, 33):
            moved = through_both(pair, f"n{length}", [length] * length, push=push)
            assert (length, moved) == (length, -(-length // BLOCK_SIZE) * BLOCK_BYTES)
        pair.check_all_is_free()


@push_or_pull
def test_d_computes_a_prompt_itself_whose_logprobs_are_wanted(plugin: ModuleType, push: bool) -> None:
    """vLLM then reads no cache, and loads nothing, whatever the connector says."""
    with engines(plugin) as pair:
        assert through_both(pair, "a", PROMPT, push=push, skip_reading_prefix_cache=True) == 0
        pair.check_all_is_free()
