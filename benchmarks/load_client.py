"""A light HTTP/1.1 load client: keep-alive connections, raw bytes, no parsing beyond what ends a response.

It shares the two cores with what it measures, so it must cost little: about 20 us a response and 2 us a chunk.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Response:
    """Times in seconds since the request was written."""

    status: int = 0
    first_byte_s: float = 0.0
    first_data_s: float = 0.0
    """First SSE event that carries text; 0 for a body that is not streamed."""
    total_s: float = 0.0
    num_events: int = 0
    body: bytes = b""
    error: str = ""


@dataclass(slots=True)
class _Waiting:
    started_at: float
    done: asyncio.Future[Response]
    keep_body: bool
    response: Response = field(default_factory=Response)


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: _Waiting | None = None
        self._head = bytearray()
        self._in_body = False
        self._is_chunked = False
        self._left = 0
        self._tail = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, *, keep_body: bool) -> asyncio.Future[Response]:
        assert self._transport is not None
        assert self._waiting is None
        self._waiting = _Waiting(time.perf_counter(), asyncio.get_running_loop().create_future(), keep_body)
        self._head.clear()
        self._body.clear()
        self._in_body = False
        self._tail = b""
        self._transport.write(request)
        return self._waiting.done

    def data_received(self, data: bytes) -> None:
        waiting = self._waiting
        if waiting is None:
            return
        now = time.perf_counter() - waiting.started_at
        if not waiting.response.first_byte_s:
            waiting.response.first_byte_s = now
        if not self._in_body:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(bytes(self._head[:end]), waiting.response)
            data = bytes(self._head[end + 4 :])
            self._in_body = True
        self._read_body(data, waiting, now)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done.done():
            self._waiting.response.error = f"connection lost: {exc}"
            self._waiting.done.set_result(self._waiting.response)
            self._waiting = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read_head(self, head: bytes, response: Response) -> None:
        response.status = int(head[9:12])
        lower = head.lower()
        self._is_chunked = b"transfer-encoding: chunked" in lower
        at = lower.find(b"content-length: ")
        self._left = int(lower[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0

    def _read_body(self, data: bytes, waiting: _Waiting, now: float) -> None:
        response = waiting.response
        if waiting.keep_body or response.status != 200:
            self._body.append(data)
        if self._is_chunked:
            response.num_events += data.count(b"data: ")
            if not response.first_data_s and (b'"content":' in data or b'"text":' in data):
                response.first_data_s = now
            self._tail = (self._tail + data)[-7:]
            is_end = self._tail.endswith(b"\r\n0\r\n\r\n")
        else:
            self._left -= len(data)
            is_end = self._left <= 0
        if is_end:
            response.total_s = now
            response.body = b"".join(self._body)
            self._waiting = None
            waiting.done.set_result(response)


async def connect(host: str, port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


def http_request(path: str, body: dict[str, object], *, host: str = "bench") -> bytes:
    """The bytes of one POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def run_load(
    host: str,
    port: int,
    *,
    concurrency: int,
    requests: int,
    make_request: Callable[[int], bytes],
    keep_body: bool = False,
    timeout_s: float = 300,
) -> tuple[float, list[Response]]:
    """(seconds, responses in the order of their numbers). Each connection sends its next request at once."""
    responses: list[Response] = [Response() for _ in range(requests)]
    numbers = iter(range(requests))

    async def one(connection: Connection) -> None:
        for number in numbers:
            responses[number] = await connection.send(make_request(number), keep_body=keep_body)
            if responses[number].error:
                connection = await connect(host, port)
        connection.close()

    connections = [await connect(host, port) for _ in range(concurrency)]
    started_at = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        await asyncio.gather(*(one(connection) for connection in connections))
    return time.perf_counter() - started_at, responses
