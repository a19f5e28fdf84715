"""vLLM's SchedulerOutput -> the chunks that a step computes, of the requests that are followed.

vLLM sends a request's whole block table when it is scheduled for the first time or again after a preemption, and only
the blocks that are new in between.
"""

from __future__ import annotations

from typing import Any

from connector.step import Scheduled


class BlockTables:
    """Of followed requests only; costs nothing while there are none."""

    def __init__(self, group: int) -> None:
        """`group`: index of the KV cache group whose blocks count."""
        self._group = group
        self._tables: dict[str, list[int]] = {}

    def follow(self, engine_request_id: str) -> None:
        """Before it is scheduled for the first time."""
        self._tables[engine_request_id] = []

    def forget(self, engine_request_id: str) -> None:
        """Ids that are not followed are ignored."""
        self._tables.pop(engine_request_id, None)

    def chunks(self, scheduler_output: Any) -> list[Scheduled]:
        """What this step computes. Asked once for each step, in order."""
        if not self._tables:
            return []
        chunks = []
        num_scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:  # in vLLM's V2 runner resumed ones too
            if new.req_id in self._tables:
                table = self._tables[new.req_id] = list(new.block_ids[self._group])
                chunks.append(Scheduled(new.req_id, table, new.num_computed_tokens + num_scheduled[new.req_id]))
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            if req_id not in self._tables:
                continue
            blocks = cached.new_block_ids[index]
            added = list(blocks[self._group]) if blocks is not None else []
            table = added if req_id in cached.resumed_req_ids else self._tables[req_id] + added
            self._tables[req_id] = table
            chunks.append(Scheduled(req_id, table, cached.num_computed_tokens[index] + num_scheduled[req_id]))
        return chunks
