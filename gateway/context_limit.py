"""How many tokens a request may have: by setting, by the model, and by what the workers' engines and KV memory take.

Any worker may get any request: jobs are not routed by size. So the smallest worker of each role decides. A request
that was accepted before a smaller one came, and meets it, moves on or ends with an error, never short of its tokens.
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
            of_roles = (_smallest(self._view.of_role(role)) for role in ("prefill", "decode"))
            self._limit = min([self._fixed, *(limit for limit in of_roles if limit)])
        return self._limit


def _smallest(workers: tuple[WorkerRecord, ...]) -> int:
    """0: nobody says. Workers on their way out count only where there are no others."""
    staying = [worker for worker in workers if worker.state != "draining"]
    return min(filter(None, map(_limit_of, staying or workers)), default=0)


def _limit_of(worker: WorkerRecord) -> int:
    """Of prompt and answer together, also at P: a request that moves is prefilled with its answer so far."""
    return worker.max_model_len or worker.total_blocks * worker.block_size
