"""P's scheduler half of pull: which prefills will be pinned, which are, and their tickets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.params import PullProducer, params_from_ticket
from connector.step import Expect
from pdq.wire.types import KvSource, KvTicket, pack_ids

HAS_KV = frozenset({"prefilled", "stop", "length"})
"""Ends after which the prompt's KV is complete; `stop`: the first token was EOS."""


@dataclass(slots=True)
class _Prefill:
    request: PullProducer
    num_tokens: int
    is_expected: bool = False


class PinnedPrefills:
    """What goes into the next step's metadata stands in the public lists, until they are taken."""

    def __init__(self, source: KvSource) -> None:
        """`source`: this engine."""
        self._source = source
        self._prefills: dict[str, _Prefill] = {}
        self._waiting: set[str] = set()
        """Finished here; their blocks are free once `finished_sending` has them."""
        self.expected: list[Expect] = []
        self.pinned: list[str] = []
        self.forgotten: list[str] = []
        self.released: list[str] = []

    def add(self, engine_request_id: str, request: PullProducer, num_tokens: int) -> None:
        self._prefills[engine_request_id] = _Prefill(request, num_tokens)

    def allocated(self, engine_request_id: str) -> None:
        """It was scheduled, for the first time or again. Unknown ids are ignored."""
        prefill = self._prefills.get(engine_request_id)
        if prefill is not None and not prefill.is_expected:
            prefill.is_expected = True
            request = prefill.request
            self.expected.append(
                Expect(engine_request_id=engine_request_id, transfer_id=request.transfer_id, pair=request.pair)
            )

    def finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None] | None:
        """(True, KV params): keep the blocks until `finished_sending`. None: not one of ours."""
        prefill = self._prefills.pop(engine_request_id, None)
        if prefill is None:
            return None
        source = self._source
        needed = -(-prefill.num_tokens // source.block_size)
        if finish not in HAS_KV or not prefill.is_expected or len(block_ids) < needed:
            if prefill.is_expected:
                self.forgotten.append(engine_request_id)
            return False, None
        self.pinned.append(engine_request_id)
        self._waiting.add(engine_request_id)
        ticket = KvTicket(
            transfer_id=prefill.request.transfer_id,
            pair=prefill.request.pair,
            engine_id=source.engine_id,
            epoch=source.epoch,
            host=source.host,
            port=source.port,
            tp_size=source.tp_size,
            block_size=source.block_size,
            num_tokens=prefill.num_tokens,
            block_ids=pack_ids(block_ids[:needed]),
        )
        return True, params_from_ticket(ticket)

    def release(self, engine_request_id: str) -> None:
        """Nobody will come. Unknown ids are ignored."""
        if engine_request_id in self._waiting:
            self.released.append(engine_request_id)

    def take_sent(self, engine_request_ids: frozenset[str]) -> frozenset[str]:
        """Those of them that were waited for; they are free now."""
        sent = engine_request_ids & self._waiting
        self._waiting -= sent
        return sent

    def has_news(self) -> bool:
        return bool(self.expected or self.pinned or self.forgotten or self.released)
