"""Dead letters as an operator reads and drops them. Never shows a prompt: of its payload only the numbers of tokens.

Keys: `pdq:{m}:dead`, `pdq:{m}:job:<id>:<gen>` (see keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.keys import Keys
from broker.redis_calls import RedisCalls
from broker.redis_queue import JOBS
from broker.redis_replies import fields, text
from pdq.wire.codec import DecodeError
from pdq.wire.types import num_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    entry_id: str
    request_id: str
    gen: int
    fields: Mapping[str, str]
    """As in the stream: reason, attempts, worker, error, tokens, tenant, ..."""
    age_s: float
    """Since it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadCounts:
    """What may be told of a request's payload."""

    num_prompt_tokens: int
    num_generated_tokens: int
    max_tokens: int
    mode: str


class DeadLetters:
    """Of one model. All calls raise QueueUnavailable."""

    def __init__(self, calls: RedisCalls, model: str) -> None:
        self._keys = Keys(model)
        self._calls = calls

    async def newest(self, limit: int) -> tuple[DeadLetter, ...]:
        """At most `limit`, the newest first."""
        seconds, micros = await self._calls.call("TIME")
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        found = await self._calls.call("XREVRANGE", self._keys.dead, "+", "-", "COUNT", limit)
        letters: list[DeadLetter] = []
        for raw_id, raw in found:
            entry_id, letter = text(raw_id), fields(raw)
            letters.append(
                DeadLetter(
                    entry_id=entry_id,
                    request_id=letter.get("id", ""),
                    gen=int(letter.get("gen", "0")),
                    fields=letter,
                    age_s=max(0, now_ms - int(entry_id.partition("-")[0])) / 1000,
                )
            )
        return tuple(letters)

    async def payload(self, letter: DeadLetter) -> PayloadCounts | str:
        """Its numbers, or why there are none (kept `dead_payload_ttl_s`)."""
        data = await self._calls.call("GET", self._keys.job(letter.request_id, letter.gen))
        if data is None:
            return "no longer kept"
        try:
            job, _ = JOBS.decode(data)
        except DecodeError as exc:
            return f"unreadable: {exc}"
        return PayloadCounts(
            num_prompt_tokens=num_ids(job.prompt_ids),
            num_generated_tokens=num_ids(job.generated_ids),
            max_tokens=job.sampling.max_tokens,
            mode=job.mode,
        )

    async def drop(self, letter: DeadLetter) -> bool:
        """Deletes letter and payload. False: somebody was faster."""
        request = (letter.request_id, letter.gen)
        where = (self._keys.dead, self._keys.req(*request), self._keys.job(*request))
        return bool(await self._calls.run("drop_dead", where, (letter.entry_id,)))
