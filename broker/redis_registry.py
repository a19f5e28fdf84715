"""The registry in Redis: one readable hash per process with a TTL, and a set of heartbeats in Redis's own time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import structlog

from broker.base import WorkerRecord
from broker.keys import MODELS, Keys
from broker.redis_calls import Argument, RedisCalls
from broker.redis_replies import fields, text
from broker.registry_settings import RegistrySettings

_log = structlog.get_logger(__name__)

_FIELDS: Final = dataclasses.fields(WorkerRecord)
_INT_FIELDS: Final = frozenset(field.name for field in _FIELDS if field.type in ("int", int))


class RedisRegistry:
    """Of one model. `calls` is shared by the process and closed by its owner."""

    def __init__(self, calls: RedisCalls, model: str, settings: RegistrySettings) -> None:
        """Raises ValueError for a model name that can't be part of a key."""
        self.keys = Keys(model)
        self._calls = calls
        self._model = model
        self.ttl_s = settings.registry_ttl_s
        self._ttl_ms = round(settings.registry_ttl_s * 1000)
        self._forget_ms = round(settings.registry_forget_s * 1000)
        self._gap_ms = round(calls.settings.redis_gap_s * 1000)
        self._known: dict[str, WorkerRecord] = {}
        self._skipped: set[str] = set()

    async def heartbeat(self, record: WorkerRecord) -> bool:
        keys = (self.keys.workers, self.keys.worker(record.worker_id), self.keys.clock)
        args: list[Argument] = [record.worker_id, self._ttl_ms, self._gap_ms, self._forget_ms]
        for field in _FIELDS:
            args += [field.name, str(getattr(record, field.name))]
        named = self._calls.submit(("SADD", MODELS, self._model))
        beat = self._calls.submit_script("heartbeat", keys, args)
        _, is_asked_to_drain = await asyncio.gather(named, beat)
        return bool(is_asked_to_drain)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """As the port says. For one TTL after a gap in Redis's answers, those known before it are kept in."""
        args = (self.keys.prefix, self._ttl_ms, self._gap_ms)
        steady_ms, raw_records = await self._calls.run("workers", (self.keys.workers, self.keys.clock), args)
        records = (self._record(fields(raw)) for raw in raw_records)
        live = {record.worker_id: record for record in records if record is not None}
        if int(steady_ms) < self._ttl_ms:
            live = self._known | live
        self._known = live
        return tuple(live.values())

    async def agree(self, config: Mapping[str, str]) -> dict[str, str]:
        args: list[Argument] = [self._ttl_ms]
        for name, value in config.items():
            args += [name, value]
        return fields(await self._calls.run("agree", (self.keys.config,), args))

    async def remove(self, worker_id: str) -> None:
        """Its last heartbeat stays for `registry_forget_s`: jobs that a gateway leaves behind are told by it."""
        self._known.pop(worker_id, None)
        await self._calls.call("UNLINK", self.keys.worker(worker_id))

    async def ask_to_drain(self, worker_id: str) -> bool:
        return bool(await self._calls.run("drain", (self.keys.worker(worker_id), self.keys.scale), ("", "")))

    async def close(self) -> None:
        """Nothing of its own to close."""

    def _record(self, found: dict[str, str]) -> WorkerRecord | None:
        """None for a record that this version can't read; logged once per process."""
        known: dict[str, Any] = {field.name: found[field.name] for field in _FIELDS if field.name in found}
        try:
            for name in _INT_FIELDS & known.keys():
                known[name] = int(known[name])
            return WorkerRecord(**known)
        except (TypeError, ValueError) as exc:
            worker_id = text(found.get("worker_id"))
            if worker_id not in self._skipped:
                self._skipped.add(worker_id)
                _log.warning("worker_record_unreadable", worker_id=worker_id, error=str(exc))
            return None
