"""The few HTTP calls that the command line makes to a gateway. Blocking; run them in a thread."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

_PROBE_TIMEOUT_S: Final = 2.0


class ChatFailed(Exception):
    """The gateway refused the request, or its stream ended with an error."""


def is_ready(url: str) -> bool:
    """GET /ready is answered with 200."""
    try:
        connection = _connect(url, _PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def stream_chat(url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float) -> Iterator[Any]:
    """The JSON events of a streamed chat completion. `timeout_s` is for each read. Raises ChatFailed."""
    connection = _connect(url, timeout_s)
    try:
        content = json.dumps(body).encode()
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            raise ChatFailed(f"HTTP {response.status}: {_error_message(response.read())}")
        yield from _events(response)
    except (OSError, http.client.HTTPException) as error:
        raise ChatFailed(f"the gateway at {url} broke off: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _connect(url: str, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=timeout_s)


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if not line.startswith(b"data:"):
            continue  # comments keep the connection open, empty lines end events
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(str(event["error"].get("message", event["error"])))
        yield event
    raise ChatFailed("the stream ended without [DONE]")


def _error_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
