"""`pdq up`'s side of scaling: says each second what runs here, hears how much shall run, and makes it so.

More: processes with the lowest free numbers. Less: those that have ended or were asked to drain by somebody go first,
then the newest; each is asked through the registry, finishes what it has and ends. A worker that ends unasked is
started again only while it is wanted: so a drained one stays away, and one killed in mid scale-down doesn't come back.
While Redis can't be reached, all stays as it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from broker.base import WorkerRecord
from broker.errors import QueueUnavailable
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale, ScaleRow, UpState, Wish
from broker.registry_settings import RegistrySettings
from pdq.cli.children import Child
from pdq.cli.fleet import Fleet
from pdq.runtime.ids import host_name

ROLES: Final = ("prefill", "decode")
_PACE_S: Final = 1.0
_LEAST_PAUSE_S: Final = 0.1
_ANSWER_S: Final = 2.0
_log = structlog.get_logger(__name__)


class ScaleControl:
    """One task (`run`) and the restarts of workers take turns. Owns its connection to Redis."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        redis_url: str,
        model: str,
        name: str,
        own: Wish,
        grace_s: float,
        start: Callable[[str, int], None],
    ) -> None:
        """`name`: of the row; `own`: what was started; `start(role, number)` starts one more."""
        self._fleet = fleet
        self._name = name
        self._wish = own
        self._is_new = True
        self._grace_s = grace_s
        self._start = start
        self._calls = RedisCalls(RedisSettings(redis=redis_url, redis_timeout_s=_ANSWER_S), client_name="pdq-up")
        self._scale = RedisScale(self._calls, model, RegistrySettings())
        self._registry = RedisRegistry(self._calls, model, RegistrySettings())
        self._ids: dict[Child, tuple[int, str]] = {}
        """Pid and worker id of each that was seen in the registry."""
        self._failed: Counter[str] = Counter()
        self._problem, self._problem_wish = "", own
        self._turns = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_reachable = True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._changed.clear()
            try:
                await self._turn()
                self._is_reachable = True
            except QueueUnavailable as exc:
                if self._is_reachable:
                    _log.warning("scale_unavailable", error=str(exc))
                self._is_reachable = False
            await asyncio.sleep(_LEAST_PAUSE_S)
            try:
                async with asyncio.timeout(_PACE_S - _LEAST_PAUSE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def changed(self) -> None:
        """A process has started or ended: worth a look before the next second."""
        self._changed.set()

    async def may_restart(self, child: Child) -> bool:
        """After an end that was not asked for here: is this worker still wanted?"""
        if child.name.rpartition("-")[0] not in ROLES:
            return True
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._turn()
        except (QueueUnavailable, TimeoutError):
            return True
        return not child.is_leaving

    def on_cannot_start(self, child: Child) -> None:
        """One of those that were started later: from now on one less is wanted, and whoever asked hears why."""
        self._failed[child.name.rpartition("-")[0]] += 1
        self._problem = f"{child.name} can't start: {child.log_tail().splitlines()[-1].strip()}"[:500]
        self._changed.set()

    async def close(self) -> None:
        """Takes the row away, if Redis can be reached."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._scale.leave(self._name)
        except (QueueUnavailable, TimeoutError) as exc:
            _log.info("scale_row_left", error=str(exc))  # it has a TTL
        finally:
            await self._calls.close()

    async def _turn(self) -> None:
        async with self._turns:
            records = {record.worker_id: record for record in await self._registry.workers()}
            self._see(records)
            state = self._state(records)
            if self._failed:
                await self._want_less(state)
            self._wish = await self._scale.beat(self._name, state, self._wish, is_new=self._is_new)
            self._is_new = False
            for role in ROLES:
                await self._apply(role, records)
            await self._ask_leaving(records)

    async def _apply(self, role: str, records: Mapping[str, WorkerRecord]) -> None:
        members = [child for child in self._fleet.of_role(role) if not child.is_leaving]
        surplus = len(members) - self._wish.of(role)
        if surplus > 0:
            known = tuple(found for child in members if (found := self._id_of(child)))
            going = (known_id for known_id in known if known_id not in records)  # left the registry: about to end
            going_ids = {*going, *await self._scale.asked_to_drain(known)}
            newest_first = list(reversed(members))
            newest_first.sort(key=lambda child: (child.pid is not None, self._id_of(child) not in going_ids))
            for child in newest_first[:surplus]:
                self._fleet.let_go(child, self._grace_s)
                if not self._id_of(child):
                    child.terminate()  # still starting: nothing in the registry to ask it through
        names = {child.name for child in self._fleet.children}
        for _ in range(-surplus):
            number = next(n for n in range(1, len(names) + 2) if f"{role}-{n}" not in names)
            names.add(f"{role}-{number}")
            self._start(role, number)

    async def _ask_leaving(self, records: Mapping[str, WorkerRecord]) -> None:
        """Again at each turn: the wish to drain is gone with the worker's key when that has run out."""
        for role in ROLES:
            for child in self._fleet.of_role(role):
                record = records.get(self._id_of(child))
                if child.is_leaving and record is not None and record.state == "ready":
                    await self._registry.ask_to_drain(record.worker_id)

    async def _want_less(self, state: UpState) -> None:
        failed, self._failed = self._failed, Counter()
        less = Wish(
            prefill=max(0, self._wish.prefill - failed["prefill"]), decode=max(0, self._wish.decode - failed["decode"])
        )
        row = ScaleRow(name=self._name, wish=self._wish, state=state)
        self._wish = await self._scale.ask(row, less) or less
        self._problem_wish = self._wish

    def _see(self, records: Mapping[str, WorkerRecord]) -> None:
        children = [child for role in ROLES for child in self._fleet.of_role(role)]
        self._ids = {child: known for child, known in self._ids.items() if child in children}
        host = host_name()
        for worker_id in records:
            owner = next((c for c in children if UpState(host=host, pids=str(c.pid)).runs(worker_id)), None)
            if owner is not None and owner.pid is not None:
                self._ids[owner] = (owner.pid, worker_id)

    def _id_of(self, child: Child) -> str:
        """Empty before it has joined the registry."""
        pid, worker_id = self._ids.get(child, (None, ""))
        return worker_id if pid == child.pid else ""

    def _state(self, records: Mapping[str, WorkerRecord]) -> UpState:
        if self._problem and not self._failed and self._wish != self._problem_wish:
            self._problem = ""  # somebody has asked for something else since
        counts: Counter[str] = Counter()
        pids: list[str] = []
        for role in ROLES:
            for child in self._fleet.of_role(role):
                record = records.get(self._id_of(child))
                is_draining = child.is_leaving or (record is not None and record.state == "draining")
                is_ready = record is not None and record.state == "ready"
                counts["draining" if is_draining else role if is_ready else "starting"] += 1
                pids += [str(child.pid)] if child.pid is not None else []
        return UpState(
            host=host_name(),
            prefill=counts["prefill"],
            decode=counts["decode"],
            starting=counts["starting"],
            draining=counts["draining"],
            pids=",".join(pids),
            wish="" if self._is_new else str(self._wish),
            problem=self._problem,
        )
