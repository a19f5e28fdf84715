"""What becomes of a request, as the verdict names it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.chaos.clients import Asked
from tests.chaos.plan import ask
from tests.chaos.verdict import Fate, fate
from tests.pipeline.ledger import Line


def asked(*, timeout_s: float | None = None, **changes: Any) -> Asked:
    question = dataclasses.replace(ask(1, 1, 1), timeout_s=timeout_s)
    line = Line(prompt="abcdef", expected="abc", is_stream=True, asked_at=100.0, seconds=1.0)
    for name, value in changes.items():
        setattr(line, name, value)
    return Asked(client=1, turn=1, gateway="gateway-2", ask=question, line=line)


def error(code: str, status: int) -> dict[str, Any]:
    return {"status": status, "error": {"code": code, "message": "why"}, "is_whole": True}


RIGHT = {"status": 200, "text": "abc", "is_whole": True, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (asked(**RIGHT), Fate.RIGHT),
        (asked(**{**RIGHT, "text": "abd"}), Fate.WRONG),
        (asked(**{**RIGHT, "text": "ab"}), Fate.WRONG),
        (asked(**{**RIGHT, "is_whole": False}), Fate.UNANSWERED),
        (asked(is_left=True, text="ab"), Fate.LEFT),
        (asked(is_left=True, text="x"), Fate.WRONG),
        (asked(**error("queue_unavailable", 503)), Fate.UNAVAILABLE),
        (asked(**error("engine_error", 502)), Fate.UNANSWERED),
        (asked(**error("deadline_exceeded", 504)), Fate.UNANSWERED),
        (asked(timeout_s=0.5, **error("deadline_exceeded", 504)), Fate.DEADLINE),
        (asked(timeout_s=0.5, seconds=20.0, **error("deadline_exceeded", 504)), Fate.UNANSWERED),
        (asked(broken="ReadError"), Fate.UNANSWERED),
    ],
)
def test_every_end_has_its_name(one: Asked, expected: Fate):
    assert fate(one, ()) is expected


def test_a_broken_connection_is_excused_only_while_the_gateway_was_away():
    broken = asked(broken="ReadError")  # at 101

    assert fate(broken, [(100.5, 103.0)]) is Fate.GATEWAY_GONE
    assert fate(broken, [(101.5, 103.0)]) is Fate.UNANSWERED
    assert fate(broken, [(90.0, 98.0)]) is Fate.UNANSWERED
