"""Where workers listen: as they said themselves when they asked Admit, else as the registry has it."""

from __future__ import annotations

from typing import Final

from broker.membership import RegistryView

_MAX_KNOWN: Final = 4096


class Endpoints:
    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._known: dict[str, str] = {}

    def saw(self, worker: str, endpoint: str) -> None:
        """Remembered beyond the worker's death: it may wake up, and has to be told to stop."""
        self._known.pop(worker, None)  # to the end of the order
        self._known[worker] = endpoint
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def of(self, worker: str) -> str | None:
        known = self._known.get(worker)
        if known is not None:
            return known
        return next((record.endpoint for record in self._view.workers if record.worker_id == worker), None)
