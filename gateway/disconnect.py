"""A client that closes its connection ends its request: watched from the first to the last byte of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from gateway.answer import Answer


@asynccontextmanager
async def watching(receive: Receive, answer: Answer) -> AsyncIterator[None]:
    """While open, a disconnect cancels the answer. On the way out whatever still runs is cancelled too."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.client_gone()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        answer.cancel()
        if answer.is_client_gone:
            answer.tell("cancelled", "client_disconnected")
        answer.tell("error", "internal_error")
