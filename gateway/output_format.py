"""`response_format` and vLLM's `structured_outputs`: what an answer's text must conform to, read and checked.

llguidance compiles it as it will at the decode worker, so that what can't be compiled is never queued (ADR 24).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from typing import Any, Final

import structlog

from gateway.errors import GatewayError
from pdq.wire.types import FormatKind, OutputFormat

log = structlog.get_logger(__name__)
_DETAIL_CHARS: Final = 500
_MAX_CHARS: Final = 64 * 1024
"""A decode worker compiles it in its event loop, a second at most for this."""
_REMEMBERED: Final = 256
_AT_ONCE: Final = 2
_PATIENCE_S: Final = 30.0
"""The compiler has a limit of its own on the CPU's time; a busy machine may not give it that for long."""


def read_output_format(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> OutputFormat | None:
    """Types and shapes only. Raises GatewayError."""
    given = {name: value for name, value in (structured_outputs or {}).items() if value is not None}
    answer = _of_response_format(response_format or {"type": "text"})
    if not given:
        return answer
    if answer is not None:
        raise _wrong("structured_outputs", "give it or response_format, not both")
    if len(given) > 1 or not given.keys() <= set(FormatKind):
        allowed = ", ".join(FormatKind)
        raise _wrong("structured_outputs", f"must have exactly one of {allowed}, has {', '.join(sorted(given))[:200]}")
    ((name, value),) = given.items()
    return _of_structured_outputs(FormatKind(name), value)


def field_of(response_format: object) -> str:
    """The request field that a format came from."""
    return "structured_outputs" if response_format in (None, {"type": "text"}) else "response_format"


class FormatChecks:
    """What clients ask for is mostly what they asked for before: good formats are remembered."""

    def __init__(self) -> None:
        self._good: OrderedDict[OutputFormat, None] = OrderedDict()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def check(self, wanted: OutputFormat, *, field: str) -> None:
        """Compiles it, see `format_compiler.py`. Raises GatewayError with what is wrong in it."""
        if len(wanted.text) > _MAX_CHARS:
            message = f"{field} has {len(wanted.text)} characters, at most {_MAX_CHARS}"
            raise GatewayError("invalid_value", message, param=field)
        if wanted not in self._good:
            async with self._slots:
                problem = await _compile(wanted)
            if problem:
                detail = " ".join(problem.split())[:_DETAIL_CHARS]
                raise GatewayError("invalid_output_format", f"{field} can't be compiled: {detail}", param=field)
        self._good[wanted] = None
        self._good.move_to_end(wanted)
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)


async def _compile(wanted: OutputFormat) -> str:
    """What is wrong; empty when all is well. Raises GatewayError when it can't be found out here."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.format_compiler"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise _no_compiler(str(error)) from error
    try:
        async with asyncio.timeout(_PATIENCE_S):
            sent = json.dumps({"kind": wanted.kind.value, "text": wanted.text}).encode()
            problem, _ = await process.communicate(sent)
    except TimeoutError:
        raise GatewayError("overloaded", "no time to compile the output format: try again later") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        if process.returncode > 0:  # by itself: not what a format can do to it
            raise _no_compiler(f"exit status {process.returncode}")
        return "it needs more time, memory or depth than a format may"
    return problem.decode(errors="replace")


def _no_compiler(why: str) -> GatewayError:
    log.error("format_compiler_failed", reason=why, advice="see what `python -m gateway.format_compiler` says")
    return GatewayError("internal_error", f"the compiler of output formats doesn't run on this gateway: {why}")


def _of_response_format(given: dict[str, Any]) -> OutputFormat | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat(kind=FormatKind.JSON_OBJECT)
    if kind != "json_schema":
        raise _wrong("response_format", "type must be text, json_object or json_schema")
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise _wrong("response_format", "json_schema must be an object with a schema, which is an object too")
    return OutputFormat(kind=FormatKind.JSON, text=json.dumps(schema))


def _of_structured_outputs(kind: FormatKind, value: object) -> OutputFormat:
    field = f"structured_outputs.{kind}"
    if kind is FormatKind.JSON_OBJECT:
        if value is not True:
            raise _wrong(field, "must be true")
        return OutputFormat(kind=kind)
    if kind is FormatKind.JSON:
        if isinstance(value, str):
            value = _parsed(field, value)
        if not isinstance(value, dict):
            raise _wrong(field, "must be a JSON schema, an object")
        return OutputFormat(kind=kind, text=json.dumps(value))
    if kind is FormatKind.CHOICE:
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise _wrong(field, "must be a list of texts, none of them empty")
        return OutputFormat(kind=kind, text=json.dumps(value))
    if not isinstance(value, str) or not value.strip():
        raise _wrong(field, "must be a text that isn't empty")
    return OutputFormat(kind=kind, text=value)


def _parsed(field: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _wrong(field, f"is no JSON: {error}") from None
    except RecursionError:
        raise _wrong(field, "is nested too deeply") from None


def _wrong(field: str, problem: str) -> GatewayError:
    return GatewayError("invalid_value", f"{field}: {problem}", param=field)
