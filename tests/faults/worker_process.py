"""A worker with points: `python -m tests.faults.worker_process prefill|decode POINTS ...`, then the role's own flags.

It is the role's `main`, with wrapped ports in the place of some that it makes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import decode_worker.main
import prefill_worker.main
from broker.links import NoticePeers
from broker.redis_queue import RedisPrefillQueue
from engine.factory import create_engine
from tests.faults.points import Points
from tests.faults.ports import StoppablePeers, StoppableQueue


def main(argv: list[str]) -> int:
    role, argument, *flags = argv
    points = Points.from_argument(argument)
    command = (sys.executable, "-m", "tests.faults.engine_process", argument)

    def peers(*args: Any, **kwargs: Any) -> StoppablePeers:
        return StoppablePeers(NoticePeers(*args, **kwargs), points)

    def queue(*args: Any) -> StoppableQueue:
        return StoppableQueue(RedisPrefillQueue(*args), points)

    module: Any = prefill_worker.main if role == "prefill" else decode_worker.main
    module.create_engine = functools.partial(create_engine, command=command)
    module.NoticePeers = peers
    if role == "prefill":
        module.RedisPrefillQueue = queue
    return int(module.main(flags))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
