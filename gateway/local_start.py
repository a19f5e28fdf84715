"""The local flow: decode workers are asked to prefill by themselves, best placed first."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import structlog

from broker import placement
from broker.errors import PeerUnavailable
from broker.links import NoticePeers
from broker.membership import RegistryView
from broker.messages import Accepted, Gone, Start
from broker.promises import Promises
from broker.silence import Silence
from gateway.commands import Enqueue
from gateway.exchange import Exchange
from pdq.wire.types import Pair, num_ids

log = structlog.get_logger(__name__)

NO_TAKE: Final = 0
"""The attempt number of a start without the queue: any take of the same gen is newer."""


class LocalStart:
    def __init__(
        self,
        peers: NoticePeers,
        view: RegistryView,
        *,
        gateway_id: str,
        endpoint: str,
        silent_s: float,
        rng: random.Random,
    ) -> None:
        """`silent_s`: a decode worker that did not answer is passed over for so long, if there are others."""
        self._peers = peers
        self._view = view
        self._gateway_id = gateway_id
        self._endpoint = endpoint
        self._rng = rng
        self._promises = Promises()
        self._silence = Silence(silent_s)

    @property
    def can_queue(self) -> bool:
        """There is a prefill worker for what no decode worker has room for."""
        return any(worker.state == "ready" for worker in self._view.of_role("prefill"))

    async def start(self, exchange: Exchange, command: Enqueue) -> bool:
        """False: every decode worker is busy or silent. True: one has it, or the request is over."""
        offer = self._offer(exchange, command)
        tokens = num_ids(exchange.prompt_ids) + num_ids(command.generated_ids)
        clock = asyncio.get_running_loop().time
        candidates = self._silence.heard_of(self._view.of_role("decode"), clock())
        while candidates:
            promised = self._promises.totals(self._view.workers)
            target = placement.choose(candidates, tokens, promised, self._rng)
            if target is None:
                return False
            candidates.remove(target)
            try:
                with self._promises.make(target.worker_id, tokens) as promise:
                    answer = await self._peers.request(target.endpoint, offer)
                    if isinstance(answer, Accepted):
                        promise.keep(answer.clock_ms)
            except PeerUnavailable:
                log.warning("decode_worker_silent", request_id=exchange.request_id, worker=target.worker_id)
                if exchange.session.owner is not None or exchange.session.is_closed:
                    return True  # it has Go; only the word that it accepted got lost
                # It may have it all the same: a take of this gen from the queue is newer and wins
                self._silence.note(target.worker_id, clock())
                continue
            if isinstance(answer, Accepted | Gone):
                return True
        return False

    def _offer(self, exchange: Exchange, command: Enqueue) -> Start:
        return Start(
            request_id=exchange.request_id,
            pair=Pair(gen=command.gen, attempt=NO_TAKE),
            remaining_s=max(0.0, exchange.session.deadline - asyncio.get_running_loop().time()),
            prompt_ids=exchange.prompt_ids,
            generated_ids=command.generated_ids,
            sampling=exchange.prompt.sampling,
            gateway=self._endpoint,
            gateway_id=self._gateway_id,
        )
