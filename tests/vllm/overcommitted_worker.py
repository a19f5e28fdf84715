"""A prefill worker that thinks its KV pool twice as large: `python -m tests.vllm.overcommitted_worker FLAGS`.

A real one takes no job that doesn't fit beside all it has, so nothing makes its vLLM preempt.
"""

from __future__ import annotations

import dataclasses
import sys

import prefill_worker.main
from engine.base import Engine, EngineInfo
from engine.factory import start_engine


async def start_twice_as_large(engine: Engine) -> EngineInfo:
    info = await start_engine(engine)
    return dataclasses.replace(info, total_blocks=2 * info.total_blocks)


if __name__ == "__main__":
    prefill_worker.main.start_engine = start_twice_as_large
    sys.exit(prefill_worker.main.main())
