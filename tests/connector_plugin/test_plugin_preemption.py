"""vLLM takes blocks away from running requests: what was handed over from them is computed, and handed over, again."""

from __future__ import annotations

import threading
import time
from types import ModuleType

import pytest

from tests.connector_plugin.pairs import continuation, engines

PROMPT = list(range(100, 130))
OTHER = list(range(300, 326))
FREED_SOON_S = 1.0
"""The plugin's: so long a reader may be about to give blocks back."""
push_or_pull = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


@push_or_pull
def test_p_is_preempted_in_mid_prefill_and_starts_over(plugin: ModuleType, push: bool) -> None:
    """Twice: once it waits for a step, once it goes on in the next one."""
    with engines(plugin, p_budget=12) as pair:
        pair.prefill("a", PROMPT, push=push)
        if push:
            pair.decode("a", PROMPT, push=True)
            pair.d.turn()
        pair.p.turn()
        pair.p.scheduler.preempt_all()
        pair.p.turn()
        pair.p.turn()
        pair.p.scheduler.preempt_all()
        pair.prefill("b", OTHER)  # takes the blocks that "a" had
        pair.p.scheduler.waiting.reverse()
        pair.run(lambda: pair.end("p-a") is not None)
        if not push:
            pair.decode("a", PROMPT)
        pair.run(lambda: pair.end("d-a") is not None)
        pair.release("b")
        pair.run_until_idle()

        assert pair.p.scheduler.num_preemptions == 2
        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()


def test_a_preempted_push_waits_for_the_write_that_reads_its_blocks(plugin: ModuleType) -> None:
    """Before the step that gives the blocks to somebody else."""
    with engines(plugin, p_budget=12) as pair:
        transport = pair.p.ranks[0].transport
        transport.write_gate.clear()
        pair.decode("a", PROMPT, push=True)
        pair.d.turn()
        pair.prefill("a", PROMPT, push=True)
        pair.p.turn()
        pair.run(transport.writing.is_set, pair.d)
        pair.p.scheduler.preempt_all()
        threading.Timer(0.1, transport.write_gate.set).start()
        pair.p.step()

        assert transport.write_gate.is_set()
        pair.run_until_idle()
        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()


@push_or_pull
def test_d_is_preempted_after_its_load_and_computes_the_prompt_itself(plugin: ModuleType, push: bool) -> None:
    with engines(plugin, d_num_blocks=18) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.run(lambda: push or pair.end("p-a") is not None)
        pair.decode_here("b", OTHER, max_tokens=24)
        pair.d.turn()
        pair.decode("a", PROMPT, max_tokens=24, push=push)
        pair.run_until_idle()

        assert pair.d.scheduler.num_preemptions > 0
        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 24))
        assert pair.end("d-b") == ("FINISHED_LENGTH_CAPPED", continuation(OTHER, 24))
        assert "failed" not in pair.d.news
        pair.check_all_is_free()


def test_blocks_that_a_reader_gives_back_soon_are_waited_for(current_plugin: ModuleType) -> None:
    """Instead of preempting a prefill; but not for those of a reader that may be dead."""
    with engines(current_plugin, p_num_blocks=13, p_budget=30) as pair:
        began = time.monotonic()
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None, pair.p)
        connector = pair.p.scheduler.connector

        assert connector.has_pending_block_frees() or time.monotonic() - began > FREED_SOON_S
        pair.run(lambda: not connector.has_pending_block_frees(), pair.p)
        assert pair.p.scheduler.requests
        pair.release("a")
        pair.run_until_idle()
        assert not connector.has_pending_block_frees()


def test_the_engine_goes_on_stepping_while_sends_are_under_way(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        transport = pair.p.ranks[0].transport
        transport.write_gate.clear()
        pair.decode("a", PROMPT, push=True)
        pair.d.turn()
        pair.prefill("a", PROMPT, push=True)
        pair.run(lambda: pair.end("p-a") is not None)

        assert pair.p.scheduler.has_requests()
        transport.write_gate.set()
        pair.run_until_idle()
        pair.check_all_is_free()
