"""Is the decode worker that owes us tokens still alive? The rule is pure; `OwnerWatch` asks the questions.

An owner is dead when
- it owes tokens and its engine made no step for `stall_s` (`owner_kv_wait_s` while the KV may still be on its way), or
- it was silent for `owner_silence_s`, a probe got no answer, and either its address refuses connections
  (the process is gone), somebody else answers there, or the silence lasts for `stall_s`.
Time in which this gateway itself hung (a stopped process, a suspended machine) counts for nobody.
A key that is missing in the registry proves nothing: a restart of Redis takes all of them at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final
from urllib.parse import urlsplit

import structlog

from broker.links import DeltaReceiver, NoticePeers
from gateway.settings import GatewaySettings

_PROBE_TIMEOUT_S: Final = 0.25
_PROBE_TRIES: Final = 2
_LATE_S: Final = 1.0
"""A check that comes so much later than due: this process hung; what its peers sent meanwhile is still to be read."""
log = structlog.get_logger(__name__)


class Verdict(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Debt:
    """What a worker owes this gateway."""

    endpoint: str
    admitted_at: float
    """Since when it owes anything: the oldest Go without an end."""
    token_at: float | None
    """When the newest token of a request that is being decoded came; None: no request has tokens yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """When the worker last sent a frame, and when its step counter last moved."""

    frame_at: float
    step_at: float


def judge(debt: Debt, pulse: Pulse | None, now: float, settings: GatewaySettings) -> Verdict:
    """SUSPECT: ask it. A worker that never sent a frame counts from its oldest Go on."""
    frame_at = max(debt.admitted_at, pulse.frame_at if pulse else 0.0)
    step_at = max(debt.admitted_at, pulse.step_at if pulse else 0.0)
    if debt.token_at is not None and now - max(step_at, debt.token_at) > settings.stall_s:
        return Verdict.DEAD
    if now - step_at > settings.owner_kv_wait_s:
        return Verdict.DEAD
    if now - frame_at > settings.owner_silence_s:
        return Verdict.SUSPECT
    return Verdict.ALIVE


class OwnerWatch:
    """Looks at every worker that owes something, once per `check`."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        peers: NoticePeers,
        receiver: DeltaReceiver,
        debts: Callable[[], dict[str, Debt]],
        on_dead: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._peers = peers
        self._receiver = receiver
        self._debts = debts
        self._on_dead = on_dead
        self._checked_at = self._awake_at = asyncio.get_running_loop().time()

    async def check(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at > self._settings.owner_check_s + _LATE_S:
            log.warning("gateway_hung", seconds=round(now - self._checked_at, 3))
            self._awake_at = now
        suspects = []
        for worker, debt in self._debts().items():
            debt = dataclasses.replace(debt, admitted_at=max(debt.admitted_at, self._awake_at))
            verdict = judge(debt, self._pulse(worker), now, self._settings)
            if verdict is Verdict.DEAD:
                self._bury(worker, "no_progress")
            elif verdict is Verdict.SUSPECT:
                suspects.append((worker, debt))
        await asyncio.gather(*(self._ask(worker, debt) for worker, debt in suspects))
        self._checked_at = asyncio.get_running_loop().time()

    async def _ask(self, worker: str, debt: Debt) -> None:
        answer = await self._peers.probe(debt.endpoint, timeout_s=_PROBE_TIMEOUT_S, tries=_PROBE_TRIES)
        if answer == worker:
            return
        if answer is not None:
            self._bury(worker, "replaced")
        elif await _is_refused(debt.endpoint):
            self._bury(worker, "process_gone")
        else:
            pulse = self._pulse(worker)
            silent_since = max(debt.admitted_at, pulse.frame_at if pulse else 0.0)
            if asyncio.get_running_loop().time() - silent_since > self._settings.stall_s:
                self._bury(worker, "silent")

    def _pulse(self, worker: str) -> Pulse | None:
        pulse = self._receiver.pulse(worker)
        return None if pulse is None else Pulse(frame_at=pulse.last_frame_at, step_at=pulse.step_changed_at)

    def _bury(self, worker: str, reason: str) -> None:
        log.warning("decode_worker_dead", decode_worker=worker, reason=reason)
        self._on_dead(worker, reason)


async def _is_refused(endpoint: str) -> bool:
    """True: nobody listens there, so the process is gone. A stopped process still accepts connections."""
    address = urlsplit(endpoint)
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
    except ConnectionRefusedError:
        return True
    except OSError:  # also a time-out: the host can't be reached, which proves nothing
        return False
    writer.close()
    return False
