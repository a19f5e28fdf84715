"""Output formats as clients write them, and what the workers get of them."""

from __future__ import annotations

import json

import pytest

from gateway.errors import GatewayError
from gateway.output_format import check_output_format, field_of, read_output_format
from pdq.wire.types import FormatKind, OutputFormat

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON = OutputFormat(kind=FormatKind.JSON, text=json.dumps(SCHEMA))


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
        await check_output_format(found, field="x")


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
    ],
)
async def test_what_does_not_compile_is_refused_in_one_line(wrong: OutputFormat) -> None:
    with pytest.raises(GatewayError) as caught:
        await check_output_format(wrong, field="structured_outputs")

    assert (caught.value.error_code, caught.value.param) == ("invalid_output_format", "structured_outputs")
    assert "can't be compiled: " in caught.value.message
    assert "\n" not in caught.value.message


def test_the_field_that_it_came_from() -> None:
    assert field_of(None) == field_of({"type": "text"}) == "structured_outputs"
    assert field_of({"type": "json_object"}) == "response_format"
