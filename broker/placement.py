"""Which decode worker gets a request. Pure: records, own promises and a random source come in.

A worker qualifies when it is a ready decode worker and has room for the tokens beside what was promised to it since its
last record. Among those the lowest token load wins. Records are up to a heartbeat old and other processes choose at the
same time: workers within `placement_tie_tokens` of the best count as equal, and of two random ones among them the less
loaded is taken, so that not everybody runs to the same worker.

When by the records none has room, the roomiest is asked all the same: only the worker itself knows what has ended
since then, and who was told Busy is told of Room.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.base import WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    placement_tie_tokens: int = field(
        default=1024, metadata={"help": "decode workers whose load differs by no more count as equal"}
    )


DEFAULTS: Final = PlacementSettings()


def free_tokens(worker: WorkerRecord, promised: Mapping[str, int]) -> int:
    """Room in the worker's KV pool, less what was promised to it since its record."""
    return worker.free_blocks * worker.block_size - promised.get(worker.worker_id, 0)


def load_tokens(worker: WorkerRecord, promised: Mapping[str, int]) -> int:
    """Tokens that the worker holds or will hold by promise."""
    return (worker.total_blocks - worker.free_blocks) * worker.block_size + promised.get(worker.worker_id, 0)


def candidates(workers: Iterable[WorkerRecord], tokens: int, promised: Mapping[str, int]) -> list[WorkerRecord]:
    """Those that could take `tokens` now, in the order given."""
    ready = (worker for worker in workers if worker.role == "decode" and worker.state == "ready")
    return [worker for worker in ready if free_tokens(worker, promised) >= tokens]


def choose(
    workers: Iterable[WorkerRecord],
    tokens: int,
    promised: Mapping[str, int],
    rng: random.Random,
    settings: PlacementSettings = DEFAULTS,
) -> WorkerRecord | None:
    """The worker to ask first, or None when there is no ready decode worker. `promised`: tokens by worker id."""
    ready = [worker for worker in workers if worker.role == "decode" and worker.state == "ready"]
    fitting = candidates(ready, tokens, promised)
    if not fitting:
        return max(ready, key=lambda worker: free_tokens(worker, promised), default=None)
    best = min(load_tokens(worker, promised) for worker in fitting)
    equal = [worker for worker in fitting if load_tokens(worker, promised) <= best + settings.placement_tie_tokens]
    pair = rng.sample(equal, k=min(2, len(equal)))
    return min(pair, key=lambda worker: load_tokens(worker, promised))
