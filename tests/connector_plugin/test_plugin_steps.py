"""vLLM tells block tables in pieces; of followed requests the whole table is known in each step."""

from __future__ import annotations

from types import SimpleNamespace as Values
from typing import Any

from connector.step import Scheduled
from connector.vllm_plugin.steps import BlockTables

New = tuple[str, list[int], int]
"""Request, block table, computed tokens."""
Again = tuple[str, list[int] | None, int]
"""Request, added blocks, computed tokens."""


def step(
    tokens: dict[str, int], *, new: tuple[New, ...] = (), again: tuple[Again, ...] = (), resumed: tuple[str, ...] = ()
) -> Any:
    return Values(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            Values(req_id=req_id, block_ids=([99], blocks), num_computed_tokens=computed)
            for req_id, blocks, computed in new
        ],
        scheduled_cached_reqs=Values(
            req_ids=[item[0] for item in again],
            new_block_ids=[None if item[1] is None else ([98], item[1]) for item in again],
            num_computed_tokens=[item[2] for item in again],
            resumed_req_ids=set(resumed),
        ),
    )


def following(*req_ids: str) -> BlockTables:
    tables = BlockTables(group=1)
    for req_id in req_ids:
        tables.follow(req_id)
    return tables


def test_a_prefill_in_chunks_adds_blocks_to_its_table() -> None:
    tables = following("a")

    first = tables.chunks(step({"a": 8, "b": 3}, new=(("b", [5], 0), ("a", [1, 2], 0))))
    second = tables.chunks(step({"a": 8}, again=(("a", [7], 8),)))
    third = tables.chunks(step({"a": 1}, again=(("a", None, 16),)))

    assert first == [Scheduled("a", [1, 2], 8)]
    assert second == [Scheduled("a", [1, 2, 7], 16)]
    assert third == [Scheduled("a", [1, 2, 7], 17)]


def test_tokens_found_in_the_prefix_cache_count_as_computed() -> None:
    assert following("a").chunks(step({"a": 3}, new=(("a", [1, 2, 3], 8),))) == [Scheduled("a", [1, 2, 3], 11)]


def test_a_resumed_request_brings_a_new_table() -> None:
    tables = following("a")
    tables.chunks(step({"a": 8}, new=(("a", [1, 2], 0),)))

    assert tables.chunks(step({"a": 4}, again=(("a", [8], 0),), resumed=("a",))) == [Scheduled("a", [8], 4)]


def test_a_resumed_request_may_come_as_a_new_one() -> None:
    tables = following("a")
    tables.chunks(step({"a": 8}, new=(("a", [1, 2], 0),)))

    assert tables.chunks(step({"a": 4}, new=(("a", [8], 0),))) == [Scheduled("a", [8], 4)]


def test_others_and_forgotten_ones_are_left_out() -> None:
    tables = following("a", "c")
    tables.forget("a")
    tables.forget("x")

    assert tables.chunks(step({"a": 4, "b": 2}, new=(("a", [8], 0),), again=(("b", [3], 9),))) == []
