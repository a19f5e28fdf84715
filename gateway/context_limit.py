"""How many tokens a request may have: by setting, by the model, and by the largest KV memory that could hold it.

A longer one would wait in the queue until its deadline: no worker could ever take it.
"""

from __future__ import annotations

from typing import Final

from broker.base import WorkerRecord
from broker.membership import RegistryView

_UNLIMITED: Final = 131_072
"""For a model that states nothing (the simulated one)."""


class ContextLimit:
    def __init__(self, view: RegistryView, *, setting: int, of_model: int | None) -> None:
        limits = [limit for limit in (setting, of_model) if limit]
        self._fixed = min(limits) if limits else _UNLIMITED
        self._view = view
        self._seen: tuple[WorkerRecord, ...] | None = None
        self._limit = self._fixed

    def __call__(self) -> int:
        """Tokens of prompt and answer together."""
        if self._view.workers is not self._seen:
            self._seen = self._view.workers
            pools = (max(map(_tokens, self._view.of_role(role)), default=0) for role in ("prefill", "decode"))
            self._limit = min([self._fixed, *(pool for pool in pools if pool)])
        return self._limit


def _tokens(worker: WorkerRecord) -> int:
    return worker.total_blocks * worker.block_size
