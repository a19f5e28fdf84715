from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from pdq.runtime import logs
from pdq.runtime.ids import worker_id


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_time_level_event_first_and_who_wrote_it_and_the_bound_request() -> None:
    stream = io.StringIO()
    logs.configure("info", True, "prefill", "prefill-1", stream=stream)

    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("prefill_worker.taker").info("taken", attempt=2)

    (line,) = lines_of(stream)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert str(line.pop("timestamp")).endswith("Z")
    assert line == {
        "level": "info",
        "event": "taken",
        "request_id": "r1",
        "attempt": 2,
        "role": "prefill",
        "worker_id": "prefill-1",
        "logger": "prefill_worker.taker",
    }


def test_less_important_lines_are_not_written() -> None:
    stream = io.StringIO()
    logs.configure("warning", True, stream=stream)

    structlog.get_logger().info("small")
    structlog.get_logger().error("big")

    assert [line["event"] for line in lines_of(stream)] == ["big"]


def test_foreign_loggers_write_in_the_same_form() -> None:
    stream = io.StringIO()
    logs.configure("info", True, "gateway", stream=stream)

    logging.getLogger("uvicorn.error").warning("slow %s", "client")

    (line,) = lines_of(stream)
    assert (line["event"], line["level"], line["role"]) == ("slow client", "warning", "gateway")


@pytest.mark.parametrize("is_json", [True, False])
def test_a_traceback_shows_no_local_variables(is_json: bool) -> None:
    stream = io.StringIO()
    logs.configure("info", is_json, stream=stream)
    prompt = "a secret".upper()

    try:
        raise RuntimeError("boom" if prompt else "")
    except RuntimeError:
        structlog.get_logger().exception("fault")

    assert "RuntimeError: boom" in stream.getvalue()
    assert prompt not in stream.getvalue()


def test_log_format_auto_leaves_the_choice_to_the_terminal() -> None:
    assert [logs.is_json(name) for name in ("auto", "json", "console")] == [None, True, False]


def test_worker_ids_are_new_each_time_and_safe_in_keys() -> None:
    one, other = worker_id("decode"), worker_id("decode")

    assert one != other
    assert one.startswith("decode-")
    assert all(char.isalnum() or char in "-._" for char in one)
