"""The queue's books (I3): every stream entry that was ever added belongs to one request, and that has one end."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tests.pipeline.harness import Pipeline

ENDED: Final = frozenset(
    {
        "decoding",
        "gone",
        "refused",
        "cancelled",
        "deadline",
        "orphaned",
        "payload_lost",
        "payload_invalid",
        "max_attempts",
    }
)
"""States of `req:*` that nobody leaves any more."""


async def states(pipeline: Pipeline, *, since_ms: int = 0) -> Counter[str]:
    """Of all requests that had a stream entry from that Redis time on; those whose `req:*` has not expired."""
    names = [raw async for raw in pipeline.redis.scan_iter(match=pipeline.key("req:*"), count=1000)]
    calls = pipeline.redis.pipeline(transaction=False)
    for name in names:
        calls.hmget(name, "entry", "state")
    found = await calls.execute()
    return Counter(state.decode() for entry, state in found if entry and int(entry.split(b"-")[0]) >= since_ms)


async def num_added(pipeline: Pipeline) -> int:
    """Stream entries since Redis lost its data last."""
    stream = pipeline.key("prefill")
    if not await pipeline.redis.exists(stream):
        return 0
    return int((await pipeline.redis.xinfo_stream(stream))["entries-added"])
