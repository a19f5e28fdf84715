"""Requests of a trace file (JSON lines, gzip or not): lengths as they are, times scaled to a load."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.fleet import PrefillTime


class Options(Protocol):
    requests: int
    skip: int
    load: float
    arrivals: str


@dataclass(frozen=True, slots=True)
class Plan:
    lengths: list[int]
    arrivals_s: list[float]


def plan_of(path: str, options: Options, speeds: Sequence[PrefillTime], *, seed: int) -> Plan:
    """Arrivals last as long as the workers need for all prompts, divided by the load.

    `trace`: the trace's own times, stretched alike. `poisson`: the same number at random times.
    """
    lengths, stamps = _read(path, options.skip, options.requests)
    capacity = sum(1 / speed.seconds(lengths[0]) for speed in speeds) * speeds[0].seconds(lengths[0])
    span_s = sum(speeds[0].seconds(length) for length in lengths) / capacity / options.load
    if options.arrivals == "poisson":
        rng = random.Random(seed)
        stamps = [0.0]
        for _ in lengths[1:]:
            stamps.append(stamps[-1] + rng.expovariate(1.0))
    first, last = stamps[0], stamps[-1]
    return Plan(lengths, [(stamp - first) / (last - first) * span_s for stamp in stamps])


def _read(path: str, skip: int, count: int) -> tuple[list[int], list[float]]:
    opened = gzip.open if Path(path).suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(skip + count), lines, strict=False)][skip:]
    return [row["input_length"] for row in rows], [row["timestamp"] / 1000 for row in rows]
