"""Does an engine move? A worker whose engine hangs must neither keep its work nor take more."""

from __future__ import annotations


class Progress:
    """When the engine's step counter last moved, or had nothing to do."""

    def __init__(self, now: float, *, stall_s: float) -> None:
        self.stall_s = stall_s
        self._step: int | None = None
        self._moved_at = now

    def observe(self, step: int, *, is_idle: bool, now: float) -> None:
        if is_idle or step != self._step:
            self._step = step
            self._moved_at = now

    def excuse(self, now: float) -> None:
        """The worker itself could not look until now: its engine's news are still to be read."""
        self._moved_at = now

    def standing_s(self, now: float) -> float:
        """Since the last movement."""
        return now - self._moved_at

    def is_stalled(self, now: float) -> bool:
        """For longer than `stall_s`. Then no job may stay here, and none may come.

        An engine that says nothing at all stands still too: it tells of itself once a second.
        """
        return self.standing_s(now) > self.stall_s
