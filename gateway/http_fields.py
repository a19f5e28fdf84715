"""What is read of a request beside its parsed body: the bytes, and a few headers, each with its limits."""

from __future__ import annotations

import math
import re
from typing import Final

from starlette.requests import ClientDisconnect, Request

from gateway.errors import GatewayError

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NOT_PRINTABLE: Final = re.compile(r"[^\x21-\x7e]")
_LONGEST_ID: Final = 128
_LONGEST_TENANT: Final = 64


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises GatewayError when it is too large or no JSON by its own account, ClientDisconnect when it ends early."""
    kind = request.headers.get("content-type", "")
    if kind and "json" not in kind.lower():
        raise GatewayError("unsupported_content_type", f"content type {kind[:100]!r}: application/json is needed")
    length = request.headers.get("content-length", "")
    too_large = GatewayError("body_too_large", f"the body has more than {max_bytes} bytes")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    parts = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def client_request_id(request: Request, default: str) -> str:
    """`X-Request-Id` as it may be logged and sent back: visible ASCII, at most 128 characters. Never used as a key."""
    given = request.headers.get("x-request-id", "")[: 4 * _LONGEST_ID]
    return _NOT_PRINTABLE.sub("", given)[:_LONGEST_ID] or default


def tenant(request: Request) -> str:
    return _NOT_PRINTABLE.sub("", request.headers.get("x-pdq-tenant", "")[: 4 * _LONGEST_TENANT])[:_LONGEST_TENANT]


def traceparent(request: Request) -> str:
    """W3C trace context, or empty."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def wants_trace(request: Request) -> bool:
    return request.headers.get("x-pdq-trace") == "1"


def timeout_s(request: Request, from_body: float | None, longest_s: float) -> float:
    """The request's deadline: the shortest of header, body and setting. Raises GatewayError."""
    given = request.headers.get("x-request-timeout-s")
    limits = [longest_s] if from_body is None else [longest_s, from_body]
    if given is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            name = "X-Request-Timeout-S"
            raise GatewayError("invalid_value", f"{name}: {given[:40]!r} is no number of seconds above 0", param=name)
        limits.append(seconds)
    return min(limits)
