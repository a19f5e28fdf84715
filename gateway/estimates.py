"""How long a prompt's prefill will take: the median over what the prefill workers say of themselves."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.membership import RegistryView
from broker.prefill_time import PrefillTime, median_ms, parse_prefill_time


class PrefillEstimates:
    def __init__(self, view: RegistryView) -> None:
        self._view = view
        self._seen: tuple[WorkerRecord, ...] | None = None
        self._times: tuple[PrefillTime, ...] = ()

    def __call__(self, num_tokens: int) -> float:
        """Milliseconds; 0 while no worker has said anything."""
        if self._view.workers is not self._seen:
            self._seen = self._view.workers
            times = (parse_prefill_time(worker.prefill_time) for worker in self._view.of_role("prefill"))
            self._times = tuple(time for time in times if time is not None)
        return median_ms(self._times, num_tokens)
