"""How many workers each `pdq up` shall run: what operators ask for, and what it runs. One readable row per `pdq up`.

Keys: `pdq:{m}:scale`, `pdq:{m}:up:<name>` (see keys.py). The wish is Redis's only while its `pdq up` is alive, which
brings it again after a loss of data; so there is no row to clean up after a host is gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final

from broker.base import WorkerRecord
from broker.keys import Keys
from broker.redis_calls import Argument, RedisCalls
from broker.redis_replies import fields, text
from broker.registry_settings import RegistrySettings

MAX_PER_ROLE: Final = 256
"""More processes of one role on one host are a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Worker processes of one `pdq up`. Raises ValueError for a senseless number."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if not 0 <= min(self.prefill, self.decode) <= max(self.prefill, self.decode) <= MAX_PER_ROLE:
            raise ValueError(f"{self}: from 0 to {MAX_PER_ROLE} processes of a role can run on one host")

    def __str__(self) -> str:
        return f"prefill={self.prefill} decode={self.decode}"

    def of(self, role: str) -> int:
        """Raises KeyError for a role that is not scaled."""
        return {"prefill": self.prefill, "decode": self.decode}[role]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpState:
    """What a `pdq up` says of its workers, a second old at most."""

    host: str
    """As in its workers' ids."""
    prefill: int = 0
    """Ready ones; so `decode`."""
    decode: int = 0
    starting: int = 0
    draining: int = 0
    pids: str = ""
    """Of its workers, with commas."""
    wish: str = ""
    """What it has read and acts on."""
    problem: str = ""
    """Why it wants less than was asked for."""

    def runs(self, worker_id: str) -> bool:
        """Worker ids are `<role>-<host>-<pid>-<random>`."""
        parts = worker_id.split("-")
        return len(parts) == 4 and parts[1] == self.host and parts[2] in self.pids.split(",")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    name: str
    wish: Wish
    state: UpState


_STATE_FIELDS: Final = dataclasses.fields(UpState)
_INT_FIELDS: Final = frozenset(field.name for field in _STATE_FIELDS if field.type in ("int", int))


class RedisScale:
    """Of one model. All calls raise QueueUnavailable."""

    def __init__(self, calls: RedisCalls, model: str, settings: RegistrySettings) -> None:
        self.keys = Keys(model)
        self._calls = calls
        self._ttl_ms = round(settings.registry_ttl_s * 1000)

    async def beat(self, name: str, state: UpState, own: Wish, *, is_new: bool = False) -> Wish:
        """Writes the state with its TTL; returns the wish in force. `is_new`: just started, `own` replaces it."""
        where = (self.keys.scale, self.keys.up(name))
        args: list[Argument] = [self.keys.prefix, name, str(own), int(is_new), self._ttl_ms]
        for field in _STATE_FIELDS:
            args += [field.name, str(getattr(state, field.name))]
        return _wish(text(await self._calls.run("scale_beat", where, args))) or own

    async def leave(self, name: str) -> None:
        """Takes the row away."""
        row = self._calls.submit(("HDEL", self.keys.scale, name))
        await asyncio.gather(row, self._calls.submit(("UNLINK", self.keys.up(name))))

    async def rows(self) -> tuple[ScaleRow, ...]:
        """Every living `pdq up`, by name."""
        rows: list[ScaleRow] = []
        for name, wish in sorted(fields(await self._calls.call("HGETALL", self.keys.scale)).items()):
            found = fields(await self._calls.call("HGETALL", self.keys.up(name)))
            known = _wish(wish)
            if found and known is not None:
                rows.append(ScaleRow(name=name, wish=known, state=_state(found)))
        return tuple(rows)

    async def ask(self, row: ScaleRow, wish: Wish) -> Wish | None:
        """Sets the wish, unless it is another one than in `row` by now. The one in force; None: `pdq up` is gone."""
        where = (self.keys.scale, self.keys.up(row.name))
        return _wish(text(await self._calls.run("scale_ask", where, (row.name, str(row.wish), str(wish)))))

    async def drain(self, worker: WorkerRecord, row: ScaleRow | None) -> bool:
        """Asks a worker to drain; `row`: of the `pdq up` that runs it and shall want one less. False: it is gone."""
        where = (self.keys.worker(worker.worker_id), self.keys.scale)
        return bool(await self._calls.run("drain", where, (row.name if row else "", worker.role)))

    async def asked_to_drain(self, worker_ids: tuple[str, ...]) -> frozenset[str]:
        """Those of them that somebody has asked."""
        marks = [self._calls.submit(("HGET", self.keys.worker(worker_id), "drain")) for worker_id in worker_ids]
        replies = await asyncio.gather(*marks)
        return frozenset(worker_id for worker_id, reply in zip(worker_ids, replies, strict=True) if text(reply) == "1")


def _wish(row: str) -> Wish | None:
    """None for a row that this version can't read."""
    found = dict(re.findall(r"(\w+)=(\d+)", row))
    try:
        return Wish(prefill=int(found["prefill"]), decode=int(found["decode"]))
    except (KeyError, ValueError):
        return None


def _state(found: dict[str, str]) -> UpState:
    known: dict[str, Any] = {"host": "", **{f.name: found[f.name] for f in _STATE_FIELDS if f.name in found}}
    for name in _INT_FIELDS & known.keys():
        known[name] = int(known[name]) if known[name].isdigit() else 0
    return UpState(**known)
