"""D's scheduler half of push: requests whose KV P will write, from their arrival to `finished_recving`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from connector.params import ParamsError, PushConsumer
from connector.renewal_thread import RenewalThread
from connector.side_channel import RecvReady
from connector.step import Lost, Receive
from connector.transfers import TransferKey
from pdq.wire.types import pack_ids


@dataclass(slots=True)
class _Receiver:
    request: PushConsumer
    num_tokens: int
    state: Literal["waiting", "receiving", "over"] = "waiting"
    is_finished: bool = False

    @property
    def key(self) -> TransferKey:
        return TransferKey(transfer_id=self.request.transfer_id, pair=self.request.pair)


class Receivers:
    """What goes into the next step's metadata stands in the public lists, until they are taken."""

    def __init__(
        self, thread: RenewalThread, *, epoch: str, host: str, port: int, tp_size: int, block_size: int
    ) -> None:
        self._thread = thread
        self._epoch = epoch
        self._host = host
        self._port = port
        self._tp_size = tp_size
        self._block_size = block_size
        self._receivers: dict[str, _Receiver] = {}
        self.receives: list[Receive] = []
        self.cancelled: list[str] = []

    def __contains__(self, engine_request_id: str) -> bool:
        return engine_request_id in self._receivers

    def is_receiving(self, engine_request_id: str) -> bool:
        receiver = self._receivers.get(engine_request_id)
        return receiver is not None and receiver.state == "receiving"

    def add(self, engine_request_id: str, request: PushConsumer, num_tokens: int) -> None:
        """Raises ParamsError."""
        if request.source.block_size != self._block_size:
            raise ParamsError(f"block size {request.source.block_size} at P, {self._block_size} here")
        self._receivers[engine_request_id] = _Receiver(request, num_tokens)

    def num_missing(self, engine_request_id: str, num_computed_tokens: int) -> int:
        """Tokens that P has to write. 0 also when the last one is all that is missing: it is computed here anyway."""
        receiver = self._receivers[engine_request_id]
        if receiver.state != "waiting" or num_computed_tokens >= receiver.num_tokens - 1:
            return 0
        return receiver.num_tokens - num_computed_tokens

    def allocated(self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """P is told where to write, from the first block that isn't here. Nothing missing: it is told that."""
        receiver = self._receivers[engine_request_id]
        if receiver.state != "waiting":
            return
        request = receiver.request
        needed = -(-receiver.num_tokens // self._block_size)
        first_block = (receiver.num_tokens - num_external_tokens) // self._block_size if num_external_tokens else needed
        ready = RecvReady(
            epoch=request.source.epoch,
            transfer_id=request.transfer_id,
            pair=request.pair,
            consumer=self._epoch,
            host=self._host,
            port=self._port,
            tp_size=self._tp_size,
            block_size=self._block_size,
            num_tokens=receiver.num_tokens,
            first_block=first_block,
            block_ids=pack_ids(block_ids[first_block:needed]),
        )
        receiver.state = "receiving" if num_external_tokens else "over"
        self._thread.offer(engine_request_id, request.source, ready, is_once=not num_external_tokens)
        if num_external_tokens:
            self.receives.append(
                Receive(
                    engine_request_id=engine_request_id,
                    transfer_id=request.transfer_id,
                    pair=request.pair,
                    source=request.source,
                    num_tokens=receiver.num_tokens,
                )
            )

    def finished(self, engine_request_id: str, finish: str) -> None:
        """D's blocks of a request that is being written stay allocated until its id is in `finished_recving`."""
        receiver = self._receivers[engine_request_id]
        if receiver.state == "receiving":
            if not receiver.is_finished:
                self._thread.withdraw(engine_request_id)
                self.cancelled.append(engine_request_id)
            receiver.is_finished = True
            return
        del self._receivers[engine_request_id]
        if receiver.state == "waiting":
            self._thread.say_cancel(receiver.request.source, receiver.key, f"{finish} before it had blocks")

    def take_received(self, engine_request_ids: frozenset[str]) -> frozenset[str]:
        """Those of them that were waited for."""
        received = frozenset(request_id for request_id in engine_request_ids if self.is_receiving(request_id))
        for engine_request_id in received:
            self._thread.withdraw(engine_request_id)
            self._receivers[engine_request_id].state = "over"
            if self._receivers[engine_request_id].is_finished:
                del self._receivers[engine_request_id]
        return received

    def lost(self) -> list[Lost]:
        """Receives that P will not end; each once."""
        return [found for found in self._thread.take_lost() if self.is_receiving(found.engine_request_id)]

    def has_news(self) -> bool:
        return bool(self.receives or self.cancelled)
