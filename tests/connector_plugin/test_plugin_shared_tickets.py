"""One KV ticket for two requests, as with `"n": 2` or an impatient proxy: the second is refused, nothing is lost."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from connector.params import PullProducer, PushConsumer, PushProducer, params_of
from tests.connector_plugin.pairs import FIRST, Engines, continuation, engines

PROMPT = list(range(100, 130))
OTHER_PROMPT = list(range(200, 230))
push_or_pull = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


def same_prefill(*, push: bool) -> dict[str, Any]:
    return params_of((PushProducer if push else PullProducer)(transfer_id="a", pair=FIRST))


def same_decode(pair: Engines, *, push: bool) -> dict[str, Any]:
    return params_of(PushConsumer(transfer_id="a", pair=FIRST, source=pair.source)) if push else pair.ticket("a")


@push_or_pull
@pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])
def test_two_decodes_with_one_ticket(plugin: ModuleType, push: bool, recompute: bool) -> None:
    with engines(plugin, recompute=recompute) as pair:
        pair.prefill("a", PROMPT, push=push)
        if not push:
            pair.run(lambda: pair.end("p-a") is not None)
        params = same_decode(pair, push=push)
        for name in ("a", "b"):
            pair.decode(name, PROMPT, params=params)
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        second = ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4)) if recompute else ("FINISHED_ERROR", [])
        assert pair.end("d-b") == second
        assert list(pair.d.news["failed"]) == ["d-b"]
        assert "n > 1 send requests of their own" in pair.d.news["failed"]["d-b"]
        pair.check_all_is_free()


@push_or_pull
def test_two_prefills_with_one_transfer_id(plugin: ModuleType, push: bool) -> None:
    with engines(plugin, num_blocks=40) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.prefill("b", OTHER_PROMPT, params=same_prefill(push=push))
        pair.run(lambda: pair.end("p-b") is not None)
        if not push:
            pair.run(lambda: pair.end("p-a") is not None)
        pair.decode("a", PROMPT, push=push)
        pair.run_until_idle()

        assert pair.p.scheduler.ends[next(key for key in pair.p.scheduler.ends if key.startswith("p-b/"))][2] is None
        assert "one request at a time" in pair.p.news["failed"]["p-b"]
        assert pair.end("d-a") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()


@push_or_pull
def test_a_prefill_with_the_transfer_id_of_one_that_has_just_ended(plugin: ModuleType, push: bool) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT, push=push)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.release("a")
        pair.run_until_idle()
        pair.prefill("b", OTHER_PROMPT, params=same_prefill(push=push))
        pair.run_until_idle()

        assert pair.end("p-b") is not None
        assert "one request at a time" in pair.p.news["failed"]["p-b"]
        pair.check_all_is_free()


def test_a_ticket_may_be_used_again_after_a_read_that_failed(plugin: ModuleType) -> None:
    with engines(plugin) as pair:
        pair.prefill("a", PROMPT)
        pair.run(lambda: pair.end("p-a") is not None)
        pair.d.ranks[0].transport.fail_reads = 2
        pair.decode("a", PROMPT)
        pair.run(lambda: pair.end("d-a") is not None)
        pair.decode("b", PROMPT, params=pair.ticket("a"))
        pair.run_until_idle()

        assert pair.end("d-a") == ("FINISHED_ERROR", [])
        assert pair.end("d-b") == ("FINISHED_LENGTH_CAPPED", continuation(PROMPT, 4))
        pair.check_all_is_free()
