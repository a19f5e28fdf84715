"""One prompt in flight: its session, what came for it and isn't written yet, and what is told about it at the end."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from broker.messages import Admit
from gateway.commands import Emit, Fail, Finish
from gateway.prepare import Prompt
from gateway.route import Route
from gateway.session import Session
from pdq.wire.types import Pair, TokenLogprob


class Bell:
    """Wakes the one task that writes a client's answer: once for all that came since its last `wait`."""

    __slots__ = ("_has_rung", "_waiter", "alarm_at")

    def __init__(self) -> None:
        self._has_rung = False
        self._waiter: asyncio.Future[None] | None = None
        self.alarm_at = math.inf
        """The hub's tick rings when this time is reached (and clears it)."""

    def ring(self) -> None:
        self._has_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._has_rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_rung = False


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """Times are those of the event loop."""

    session: Session
    prompt: Prompt
    prompt_ids: bytes
    bell: Bell
    is_impatient: bool
    """Ring at each new token, not only at the end."""
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""
    received_at: float = 0.0
    enqueued_at: float = 0.0
    route: Route | None = None
    """Which way it went last."""
    admitted_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float = 0.0
    emits: list[Emit] = field(default_factory=list)
    end: Finish | Fail | None = None
    admit: Admit | None = None
    """Of the decode worker that has Go, or had it last."""
    is_unlisted: bool = False
    """That worker's last list of open requests did not name it."""
    failed_prefills: int = 0
    """Times that its KV never came: the queue counts them on, over all gens."""
    first_admit: Admit | None = None
    """Of the one that sent the first token: its prefill is the one that the client's prompt was charged for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def request_id(self) -> str:
        return self.session.request_id

    @property
    def cached_tokens(self) -> int:
        stats = self.end.stats if isinstance(self.end, Finish) else None
        if stats is not None and stats.prefill_cached_tokens is not None:
            return stats.prefill_cached_tokens
        if stats is not None and self.admit is not None and not self.admit.prefill_worker:
            return stats.cached_tokens  # local: D's own
        admit = self.first_admit or self.admit
        return 0 if admit is None else admit.cached_tokens

    def kv_holder(self, pair: Pair) -> str | None:
        """The prefill worker that may still hold the KV of this attempt; None once a token showed that it was read."""
        is_unread = self.admit is not None and self.admit.pair == pair and self.last_token_at < self.admitted_at
        return self.admit.prefill_worker if self.admit is not None and is_unread else None

    def take(self) -> list[Emit]:
        """What came since the last call."""
        emits, self.emits = self.emits, []
        return emits
