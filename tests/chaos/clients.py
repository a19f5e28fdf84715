"""The load: so many clients, each asking what the plan says, one thing after the other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.chaos import plan
from tests.pipeline.ledger import Ledger, Line

PAUSE_S = 0.5
"""After an error: the next request at once would only hear it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of the plan, and what became of it."""

    client: int
    turn: int
    gateway: str
    ask: plan.Ask
    line: Line

    @property
    def name(self) -> str:
        return f"{self.client}.{self.turn}"


class Load:
    """`ledgers` by gateway, in order of their names. Most clients ask the first one."""

    def __init__(self, seed: int, ledgers: dict[str, Ledger]) -> None:
        self._seed = seed
        self._ledgers = ledgers
        self._names = sorted(ledgers)
        self._is_over = asyncio.Event()
        self.asked: list[Asked] = []

    def open_ids(self) -> list[str]:
        """Of those whose clients know their id and have no end yet."""
        lines = (line for ledger in self._ledgers.values() for line in ledger.lines)
        return [line.request_id for line in lines if line.request_id and not line.is_over]

    def stop(self) -> None:
        """Everybody gets the answer to what he has asked, and asks nothing more."""
        self._is_over.set()

    async def run(self) -> None:
        """Until it is stopped."""
        async with asyncio.TaskGroup() as group:
            for number in range(1, plan.NUM_CLIENTS + 1):
                gateway = self._names[number % 4 == 0]
                group.create_task(self._client(number, gateway), name=f"client {number}")

    async def _client(self, number: int, gateway: str) -> None:
        turn = 0
        while not self._is_over.is_set():
            turn += 1
            line = await self._ask(number, turn, gateway)
            if line.broken or line.error:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, number: int, turn: int, gateway: str) -> Line:
        ask = plan.ask(self._seed, number, turn)
        line = await self._ledgers[gateway].ask(
            ask.prompt,
            max_tokens=ask.max_tokens,
            stream=ask.is_stream,
            leave_after_s=ask.leave_after_s,
            expected=ask.expected,
            headers={} if ask.timeout_s is None else {"x-request-timeout-s": f"{ask.timeout_s:.3f}"},
            **({} if ask.stop is None else {"stop": [ask.stop]}),
        )
        self.asked.append(Asked(client=number, turn=turn, gateway=gateway, ask=ask, line=line))
        return line
