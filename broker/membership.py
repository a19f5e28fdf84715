"""This process's place in the registry: its entry, its heartbeat, and a cached view of the other processes.

The view is a hint for placement, never proof of death: when Redis does not answer, the last view stays.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import structlog

from broker.base import Registry, WorkerRecord
from broker.errors import DoesNotFit, QueueUnavailable
from broker.fit import misfit

log = structlog.get_logger(__name__)


class RegistryView:
    """The other processes as of the last refresh."""

    def __init__(self) -> None:
        self.workers: tuple[WorkerRecord, ...] = ()
        self.is_current = False
        """False while the registry can't be reached."""

    def of_role(self, role: str) -> tuple[WorkerRecord, ...]:
        return tuple(worker for worker in self.workers if worker.role == role)


class Membership:
    """One task (`run`) beats and refreshes the view; everybody else reads the view."""

    def __init__(
        self,
        registry: Registry,
        view: RegistryView,
        *,
        heartbeat_s: float,
        config: Mapping[str, str],
        record: Callable[[], WorkerRecord],
        on_drain: Callable[[], None],
    ) -> None:
        """`record` is called at each beat and says what is true now; `on_drain` when the registry asks to drain.

        `config`: settings that all processes of the model must have alike, as text (`mode`).
        """
        self._registry = registry
        self._view = view
        self._heartbeat_s = heartbeat_s
        self._record = record
        self._on_drain = on_drain
        self._config = config
        self._reported = ""

    async def join(self, *, patience_s: float | None = None) -> None:
        """The first beats: as `starting`; once it fits those who are there, as the record says.

        Those who are there may be dead already, so a newcomer that doesn't fit looks again for `patience_s` (None: one
        TTL of the registry). Then it is out of the registry again, and DoesNotFit comes. Also raises QueueUnavailable.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + (self._registry.ttl_s if patience_s is None else patience_s)
        is_told = False
        while problem := await self._reason_not_to_serve():
            if clock() >= give_up_at:
                await self.leave()
                raise DoesNotFit(problem)
            if not is_told:
                log.warning("does_not_fit_yet", reason=problem, gives_up_in_s=round(give_up_at - clock(), 3))
                is_told = True
            await asyncio.sleep(self._heartbeat_s)
        await self.beat()

    async def beat(self) -> None:
        """One heartbeat. Raises QueueUnavailable."""
        disagreement = await self._disagreement()
        if disagreement and disagreement != self._reported:
            log.error("model_config_differs", reason=disagreement)
        self._reported = disagreement
        if await self._registry.heartbeat(self._record()):
            self._on_drain()
        self._view.workers = await self._registry.workers()
        self._view.is_current = True

    async def run(self) -> None:
        """Beats until cancelled; an unreachable registry is logged once and tried again."""
        while True:
            try:
                await self.beat()
            except QueueUnavailable as exc:
                if self._view.is_current:
                    log.warning("registry_unavailable", error=str(exc))
                self._view.is_current = False
            await asyncio.sleep(self._heartbeat_s)

    async def leave(self) -> None:
        """Takes this process out of the registry; an unreachable registry forgets it after its TTL."""
        try:
            await self._registry.remove(self._record().worker_id)
        except QueueUnavailable as exc:
            log.warning("registry_unavailable", error=str(exc))

    async def _reason_not_to_serve(self) -> str | None:
        """Writes before it reads: of two that start at once at least one sees the other."""
        if disagreement := await self._disagreement():
            return disagreement
        own = dataclasses.replace(self._record(), state="starting")
        await self._registry.heartbeat(own)
        return misfit(own, await self._registry.workers())

    async def _disagreement(self) -> str:
        """Empty: this process and the others have the same settings where they must."""
        in_force = await self._registry.agree(self._config)
        return "; ".join(
            f"{name} is {value} here, but {in_force.get(name)} in every running process of this model;"
            f" use --{name.replace('_', '-')} {in_force.get(name)}, or stop those first"
            for name, value in self._config.items()
            if in_force.get(name) != value
        )
