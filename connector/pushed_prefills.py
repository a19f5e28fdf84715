"""P's scheduler half of push: which blocks each step makes final, and which prefills wait for their writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connector.params import PushProducer
from connector.pinned_prefills import HAS_KV
from connector.step import Push, Save, Scheduled, StopPush


@dataclass(slots=True)
class _Prefill:
    num_tokens: int
    num_saved: int = 0
    """Blocks that the worker halves know."""
    is_saved: bool = False
    """The step that ends the prefill was scheduled."""


class PushedPrefills:
    """What goes into the next step's metadata stands in the public lists, until they are taken."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._prefills: dict[str, _Prefill] = {}
        self._waiting: set[str] = set()
        """Finished here; their blocks are free once `finished_sending` has them."""
        self.pushes: list[Push] = []
        self.pushed: list[str] = []
        self.stopped: list[StopPush] = []

    def __contains__(self, engine_request_id: str) -> bool:
        """Its prefill has not ended."""
        return engine_request_id in self._prefills

    def add(self, engine_request_id: str, request: PushProducer, num_tokens: int) -> None:
        self._prefills[engine_request_id] = _Prefill(num_tokens)
        self.pushes.append(
            Push(
                engine_request_id=engine_request_id,
                transfer_id=request.transfer_id,
                pair=request.pair,
                num_tokens=num_tokens,
                block_size=self._block_size,
            )
        )

    def saves(self, scheduled: Iterable[Scheduled]) -> list[Save]:
        """Whole blocks of each chunk; the partial last block with the last chunk. Prefix hits with the first one."""
        if not self._prefills:
            return []
        saves = []
        for chunk in scheduled:
            prefill = self._prefills.get(chunk.engine_request_id)
            if prefill is None or prefill.is_saved:
                continue
            is_last = chunk.num_tokens >= prefill.num_tokens
            end = -(-prefill.num_tokens // self._block_size) if is_last else chunk.num_tokens // self._block_size
            if is_last or end > prefill.num_saved:
                block_ids = tuple(chunk.block_ids[prefill.num_saved : end])
                saves.append(Save(engine_request_id=chunk.engine_request_id, block_ids=block_ids, is_last=is_last))
                prefill.num_saved, prefill.is_saved = end, is_last
        return saves

    def preempted(self, engine_request_ids: Iterable[str]) -> tuple[str, ...]:
        """Those of them that are pushed."""
        found = [request_id for request_id in engine_request_ids if request_id in self._prefills]
        for engine_request_id in found:
            prefill = self._prefills[engine_request_id]
            prefill.num_saved, prefill.is_saved = 0, False
        return tuple(found)

    def finished(self, engine_request_id: str, block_ids: Sequence[int], finish: str) -> bool | None:
        """True: keep the blocks until `finished_sending`, also after an abort. None: no push of ours."""
        prefill = self._prefills.pop(engine_request_id, None)
        if prefill is None:
            return None
        if finish in HAS_KV and prefill.is_saved:
            self.pushed.append(engine_request_id)
            self._waiting.add(engine_request_id)
            return True
        has_blocks = bool(block_ids)
        if has_blocks:
            self._waiting.add(engine_request_id)
        self._stop(engine_request_id, f"the prefill ended: {finish}", is_reported=has_blocks)
        return has_blocks

    def release(self, engine_request_id: str) -> None:
        """Nobody wants it any more. Unknown ids are ignored."""
        if engine_request_id in self._waiting:
            self._stop(engine_request_id, "released", is_reported=True)

    def take_sent(self, engine_request_ids: frozenset[str]) -> frozenset[str]:
        """Those of them that were waited for; they are free now."""
        sent = engine_request_ids & self._waiting
        self._waiting -= sent
        return sent

    def has_news(self) -> bool:
        return bool(self.pushes or self.pushed or self.stopped)

    def _stop(self, engine_request_id: str, reason: str, *, is_reported: bool) -> None:
        self.stopped.append(StopPush(engine_request_id=engine_request_id, reason=reason, is_reported=is_reported))
