"""Output formats as clients write them, and what the workers get of them."""

from __future__ import annotations

import json

import pytest

from gateway.errors import GatewayError
from gateway.output_format import FormatChecks, field_of, read_output_format
from pdq.wire.types import FormatKind, OutputFormat

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON = OutputFormat(kind=FormatKind.JSON, text=json.dumps(SCHEMA))

CHAIN = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{number}": {"items": {"$ref": f"#/$defs/a{number + 1}"}} for number in range(1200)} | {"a1200": {}},
}
"""Flat, and deep: a call within a call for each of them."""


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "wanted"),
    [
        (None, None, None),
        ({"type": "text"}, {}, None),
        (None, {"regex": None}, None),
        ({"type": "json_object"}, None, OutputFormat(kind=FormatKind.JSON_OBJECT)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, None, JSON),
        (None, {"json": SCHEMA}, JSON),
        (None, {"json": json.dumps(SCHEMA), "regex": None}, JSON),
        ({"type": "text"}, {"json_object": True}, OutputFormat(kind=FormatKind.JSON_OBJECT)),
        (None, {"regex": "[a-z]+"}, OutputFormat(kind=FormatKind.REGEX, text="[a-z]+")),
        (None, {"choice": ["yes", "no"]}, OutputFormat(kind=FormatKind.CHOICE, text='["yes", "no"]')),
        (None, {"grammar": 'start: "a"'}, OutputFormat(kind=FormatKind.GRAMMAR, text='start: "a"')),
    ],
)
async def test_every_way_to_say_it_is_read_and_compiles(response_format, structured_outputs, wanted) -> None:
    found = read_output_format(response_format, structured_outputs)

    assert found == wanted
    if found is not None:
        await FormatChecks().check(found, field="x")


@pytest.mark.parametrize(
    "wrong",
    [
        OutputFormat(kind=FormatKind.JSON, text='{"type": "objct"}'),
        OutputFormat(kind=FormatKind.JSON, text='{"$ref": "#/nowhere"}'),
        OutputFormat(kind=FormatKind.JSON, text='{"type": "string", "pattern": "(a"}'),
        OutputFormat(kind=FormatKind.REGEX, text="(a"),
        OutputFormat(kind=FormatKind.GRAMMAR, text="start: nobody"),
        OutputFormat(kind=FormatKind.GRAMMAR, text="root ::= 'a'"),
        OutputFormat(kind=FormatKind.JSON, text='{"items": ' * 5000 + "{}" + "}" * 5000),
        # What never gets its first token would be an empty answer.
        OutputFormat(kind=FormatKind.JSON, text='{"$ref": "#"}'),
        OutputFormat(kind=FormatKind.GRAMMAR, text="start: start"),
        # Each of these ends the process that compiles it.
        OutputFormat(kind=FormatKind.JSON, text='{"type": "array", "minItems": 100000000}'),
        OutputFormat(kind=FormatKind.JSON, text=json.dumps(CHAIN)),
        OutputFormat(kind=FormatKind.JSON, text='{"x-guidance": {"item_separator": "("}, "type": "object"}'),
    ],
)
async def test_what_does_not_compile_is_refused_in_one_line(wrong: OutputFormat) -> None:
    with pytest.raises(GatewayError) as caught:
        await FormatChecks().check(wrong, field="structured_outputs")

    assert (caught.value.error_code, caught.value.param) == ("invalid_output_format", "structured_outputs")
    assert "can't be compiled: " in caught.value.message
    assert "\n" not in caught.value.message


def test_the_field_that_it_came_from() -> None:
    assert field_of(None) == field_of({"type": "text"}) == "structured_outputs"
    assert field_of({"type": "json_object"}) == "response_format"


async def test_a_text_that_would_take_the_decode_worker_long_is_refused() -> None:
    wanted = OutputFormat(kind=FormatKind.CHOICE, text=json.dumps(["x" * 10] * 10_000))

    with pytest.raises(GatewayError, match="at most 65536") as caught:
        await FormatChecks().check(wanted, field="structured_outputs")

    assert caught.value.error_code == "invalid_value"


async def test_a_good_format_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = FormatChecks()
    await checks.check(JSON, field="x")
    monkeypatch.setattr("sys.executable", "/nothing/here")

    await checks.check(JSON, field="x")

    with pytest.raises(GatewayError):
        await checks.check(OutputFormat(kind=FormatKind.REGEX, text="a"), field="x")


@pytest.mark.parametrize(("python", "why"), [("/nothing/here", "No such file"), ("/bin/false", "exit status 1")])
async def test_a_compiler_that_does_not_run_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch, python: str, why: str
) -> None:
    monkeypatch.setattr("sys.executable", python)

    with pytest.raises(GatewayError, match=why) as caught:
        await FormatChecks().check(JSON, field="x")

    assert caught.value.status == 500
