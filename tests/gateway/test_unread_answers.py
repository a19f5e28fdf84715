"""Clients that don't read: one that takes nothing is disconnected, one that is slow is not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send

from gateway.http_server import HttpServer

UNREAD_S = 2.0
LIMIT_S = 30
NUM_BYTES = 8 * 2**20  # more than the sockets' buffers on either side
REQUEST = b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n"


class Answers:
    """Each request is answered with NUM_BYTES."""

    def __init__(self) -> None:
        self.disconnected = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(NUM_BYTES // 2**16):
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()


@contextlib.asynccontextmanager
async def client_of(answers: Answers) -> AsyncIterator[socket.socket]:
    """Has sent its request; a small buffer, so that it is the server who notices when nothing is read."""
    server = HttpServer(answers, host="127.0.0.1", port=0, unread_s=UNREAD_S)
    serving = asyncio.create_task(server.serve())
    await server.started()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        url = urlsplit(server.url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (url.hostname, url.port))
        await loop.sock_sendall(client, REQUEST)
        yield client
    server.stop()
    await serving
    server.close()


async def read_all(client: socket.socket, *, pause_s: float = 0.0) -> tuple[int, float]:
    """Number of bytes, -1 if the server has hung up; and the longest time between two reads. `pause_s`: at first."""
    num_bytes, longest_s = 0, 0.0
    loop = asyncio.get_running_loop()
    read_at = loop.time()
    with contextlib.suppress(ConnectionResetError):
        while part := await loop.sock_recv(client, 2**20):
            longest_s, read_at = max(longest_s, loop.time() - read_at), loop.time()
            num_bytes += len(part)
            if num_bytes < 2**16:
                await asyncio.sleep(pause_s)  # its length is what is tested
        return num_bytes, longest_s
    return -1, max(longest_s, loop.time() - read_at)


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    answers = Answers()
    async with client_of(answers) as client, asyncio.timeout(LIMIT_S):
        await answers.disconnected.wait()

        assert (await read_all(client))[0] == -1


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    for _ in range(5):
        async with client_of(Answers()) as client, asyncio.timeout(LIMIT_S):
            num_bytes, longest_s = await read_all(client, pause_s=UNREAD_S / 10)
        if longest_s < UNREAD_S / 2:
            break  # else this machine was so slow that the client did not read at all

    assert num_bytes >= NUM_BYTES
