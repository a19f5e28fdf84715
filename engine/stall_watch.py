"""Watches over an engine that may hang: first its worker is told, and in the end it has to go and be started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from engine.base import EngineError
from engine.progress import Progress

_PACE_S: Final = 0.5
_LATE_S: Final = 1.0
"""A look that comes so much later than due: this process hung itself, and the engine's beats are still to be read."""
log = structlog.get_logger(__name__)


class StallWatch:
    def __init__(
        self, progress: Progress, *, exit_s: float, clock: Callable[[], float], on_stall: Callable[[], None]
    ) -> None:
        """`on_stall`: the engine has made no progress for the stall time; called once until it moves again."""
        self._progress = progress
        self._exit_s = exit_s
        self._clock = clock
        self._on_stall = on_stall
        self._looked_at = clock()
        self._is_told = False

    async def run(self) -> None:
        """Until cancelled. Raises as `look` does."""
        self._looked_at = self._clock()
        while True:
            await asyncio.sleep(_PACE_S)
            self.look(self._clock())

    def look(self, now: float) -> None:
        """Raises EngineError when the engine stands still for `exit_s` longer than the stall time."""
        progress = self._progress
        if now - self._looked_at > _PACE_S + _LATE_S:
            log.warning("worker_hung", seconds=round(now - self._looked_at, 3))
            progress.excuse(now)
        self._looked_at = now
        if not progress.is_stalled(now):
            if self._is_told:
                log.warning("engine_moves_again")
            self._is_told = False
            return
        if not self._is_told:
            log.error("engine_stalled", stall_s=progress.stall_s, exit_s=self._exit_s)
            self._on_stall()
            self._is_told = True
        if progress.standing_s(now) > progress.stall_s + self._exit_s:
            raise EngineError(f"the engine has made no progress for {progress.standing_s(now):.0f} s")
