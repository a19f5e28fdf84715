"""This process's place in the registry: its heartbeat, and a cached view of the other processes.

The view is a hint for placement, never proof of death: when Redis does not answer, the last view stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from broker.base import Registry, WorkerRecord
from broker.errors import QueueUnavailable

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipSettings:
    heartbeat_s: float = field(default=1.0, metadata={"help": "how often a process writes its record to the registry"})


class Membership:
    """One task (`run`) beats and refreshes the view; everybody else reads `workers`."""

    def __init__(self, registry: Registry, settings: MembershipSettings, record: Callable[[], WorkerRecord]) -> None:
        """`record` is called at each beat and says what is true now."""
        self._registry = registry
        self._settings = settings
        self._record = record
        self.workers: tuple[WorkerRecord, ...] = ()
        self.is_connected = False
        self.drain_requested = asyncio.Event()

    async def beat(self) -> None:
        """One heartbeat. Raises QueueUnavailable."""
        if await self._registry.heartbeat(self._record()):
            self.drain_requested.set()
        self.workers = await self._registry.workers()
        self.is_connected = True

    async def run(self) -> None:
        """Beats until cancelled; an unreachable registry is logged once and tried again."""
        while True:
            try:
                await self.beat()
            except QueueUnavailable as exc:
                if self.is_connected:
                    log.warning("registry_unavailable", error=str(exc))
                self.is_connected = False
            await asyncio.sleep(self._settings.heartbeat_s)

    async def leave(self) -> None:
        """Takes this process out of the registry; an unreachable registry forgets it after its TTL."""
        try:
            await self._registry.remove(self._record().worker_id)
        except QueueUnavailable as exc:
            log.warning("registry_unavailable", error=str(exc))

    def of_role(self, role: str) -> tuple[WorkerRecord, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)
