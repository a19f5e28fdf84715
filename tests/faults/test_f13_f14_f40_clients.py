"""Odd clients: F13 one that does not read its stream, F14 two with the same id, F40 a crowd after a long rest."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
import pytest_asyncio

from tests.faults.crew import Crew, hired, judged
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger, text_of

pytestmark = [
    pytest.mark.push_suffices,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.parametrize("pipeline", ["push"], indirect=True, scope="package"),
]

IDLE_S = 1.0
NUM_CHOICES, NUM_TOKENS = 30, 500
"""Of an unread stream: with its log probabilities some 7 MB, more than the sockets' buffers hold."""
MEMORY_BYTES = 100 * 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def crew(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    async with hired(
        pipeline,
        tmp_path_factory.mktemp("crew"),
        prefill_flags=(),
        decode_flags=("--delta-link-idle-s", str(IDLE_S)),
    ) as hired_crew:
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def judge(crew: Crew) -> AsyncIterator[None]:
    async with judged(crew):
        yield


@dataclass(slots=True)
class LateReader:
    """Asks for a stream of many choices and reads it when it may."""

    prompts: list[str]
    request_id: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    texts: dict[int, str] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)
    """Finish reasons and the stream's own end, in order."""

    async def ask(self, url: str) -> None:
        body = {"model": "sim", "prompt": self.prompts, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        transport = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)])
        async with (
            httpx.AsyncClient(base_url=url, transport=transport, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={**body, "logprobs": 20}) as response,
        ):
            self.request_id = response.headers["x-request-id"]
            self.has_begun.set()
            await self.may_read.wait()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
                    self.ends += filter(None, [choice["finish_reason"]])
                elif line.startswith("data: "):
                    self.ends.append(line.removeprefix("data: "))


async def test_a_client_that_does_not_read_holds_up_nobody_and_gets_its_exact_tokens_later(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    gateway = psutil.Process(pipeline.child("gateway-1").pid)
    await ledger.ask("warm up")
    before = gateway.memory_info().rss
    reader = LateReader([text_of(NUM_TOKENS, random.Random(number)) for number in range(NUM_CHOICES)])

    def unheard() -> set[str]:
        """Of those that were answered and of the unread one, whose end the gateway has not told."""
        told = {e["request_id"] for e in process_logs.events(pipeline.log_dir, "request_finished", "gateway-1")}
        return {reader.request_id, *(line.request_id for line in ledger.lines)} - told

    async def untold() -> str:
        return ", ".join(unheard() - {reader.request_id})

    async with asyncio.timeout(110), asyncio.TaskGroup() as group:
        group.create_task(reader.ask(pipeline.url))
        await reader.has_begun.wait()

        await asyncio.gather(*(ledger.ask(f"{n} reads at once", max_tokens=10, stream=n % 2 == 0) for n in range(20)))
        await crew.freed(limit_s=40)  # the workers are done with it, read or not
        grown = gateway.memory_info().rss - before
        await eventually(untold, limit_s=40, what="ends of those that read")
        is_unread = unheard() == {reader.request_id}
        reader.may_read.set()

    print(f"the gateway grew by {grown >> 20} MiB")
    ledger.all_right()
    assert is_unread, "it is still being written"
    assert grown < MEMORY_BYTES
    assert list(reader.texts.values()) == [reader.prompts[index] for index in reader.texts]
    assert reader.ends == ["length"] * NUM_CHOICES + ["[DONE]"]


async def test_two_requests_with_the_same_client_id_are_two_requests(crew: Crew, ledger: Ledger) -> None:
    same = {"X-Request-Id": "same-for-all"}
    lines = await asyncio.gather(
        *(
            ledger.ask(
                f"{number} of ten " * 40,
                max_tokens=200,
                stream=number % 2 == 0,
                headers=same,
                leave_after_s=0.02 if number in (3, 4) else None,
            )
            for number in range(10)
        )
    )

    assert sum(line.is_left for line in lines) <= 2
    assert {line.request_id for line in lines if not line.is_left} == {"same-for-all"}
    ledger.all_right()


async def test_a_crowd_after_a_rest_is_served_although_idle_connections_were_dropped(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    await ledger.ask("before the rest")
    await asyncio.sleep(2 * IDLE_S)  # the link for tokens is closed as unused
    await pipeline.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    rng = random.Random(40)
    await asyncio.gather(
        *(
            ledger.ask(f"{number} {text_of(rng.choice((5, 200, 1500)), rng)}", max_tokens=20, stream=number % 2 == 0)
            for number in range(100)
        )
    )

    ledger.all_right()
