"""The registry's twin in memory. One object is the store and its only client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from broker.base import WorkerRecord
from broker.registry_settings import RegistrySettings


class MemoryRegistry:
    def __init__(
        self, settings: RegistrySettings | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` in seconds."""
        self.ttl_s = (settings or RegistrySettings()).registry_ttl_s
        self._clock = clock
        self._records: dict[str, tuple[float, WorkerRecord]] = {}
        self._draining: set[str] = set()
        self._config: dict[str, str] = {}
        self._config_until = 0.0

    async def heartbeat(self, record: WorkerRecord) -> bool:
        self._records[record.worker_id] = (self._clock(), record)
        return record.worker_id in self._draining

    async def workers(self) -> tuple[WorkerRecord, ...]:
        now = self._clock()
        return tuple(record for beat, record in self._records.values() if now - beat <= self.ttl_s)

    async def agree(self, config: Mapping[str, str]) -> dict[str, str]:
        now = self._clock()
        if now > self._config_until:
            self._config.clear()
        in_force = dict(config) | self._config
        if in_force == self._config | dict(config):
            self._config_until = now + self.ttl_s
        self._config = in_force
        return dict(in_force)

    async def remove(self, worker_id: str) -> None:
        self._records.pop(worker_id, None)
        self._draining.discard(worker_id)

    async def ask_to_drain(self, worker_id: str) -> bool:
        if all(record.worker_id != worker_id for record in await self.workers()):
            return False
        self._draining.add(worker_id)
        return True

    async def close(self) -> None:
        """Nothing to close."""
