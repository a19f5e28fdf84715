"""A prefill worker that reads the FIFO which a pushing gateway fills for it, and nothing else. The baseline.

python -m benchmarks.pushed_worker NUMBER [prefill worker flags]
"""

from __future__ import annotations

import sys

import prefill_worker.main as worker_main
from benchmarks.pushing_gateway import fifo_name
from broker.delivery import QueueSettings
from broker.redis_calls import RedisCalls
from broker.redis_queue import RedisPrefillQueue


def main() -> int:
    number = int(sys.argv[1])

    def own_fifo(calls: RedisCalls, model: str, settings: QueueSettings) -> RedisPrefillQueue:
        return RedisPrefillQueue(calls, fifo_name(model, number), settings)

    worker_main.RedisPrefillQueue = own_fifo  # type: ignore[misc,assignment]
    return worker_main.main(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
