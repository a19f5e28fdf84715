"""Where requests go: into the prefill queue, or to a decode worker directly; cancel, and look for lost jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import structlog

from broker.base import CODE_OF_END, RETRYABLE_ENDS, JobFate, PrefillJob, PrefillQueue
from broker.errors import QueueUnavailable
from gateway.commands import Command, Enqueue
from gateway.exchange import Exchange
from gateway.local_start import LocalStart
from gateway.queue_cancels import QueueCancels
from gateway.route import Route, Way, choose_route
from gateway.session import State
from pdq.runtime.background import Background
from pdq.wire.types import Pair, num_ids

_RETRY_MIN_S: Final = 0.25
_RETRY_MAX_S: Final = 2.0
_AGAIN_AT_ONCE: Final = 16
"""Calls that put a request back into the queue at the same time: after a loss of data all of them want to."""
log = structlog.get_logger(__name__)


class Perform(Protocol):
    """Carries out a session's commands; `reason`: why it moves on to its next gen, if it does."""

    def __call__(self, exchange: Exchange, commands: list[Command], reason: str = "") -> None: ...


class QueueSide:
    def __init__(
        self,
        queue: PrefillQueue,
        background: Background,
        *,
        gateway_id: str,
        endpoint: str,
        mode: Way,
        local_max_tokens: int,
        local: LocalStart,
        estimate_ms: Callable[[int], float],
        on_route: Callable[[Route], None],
        timeout_s: float,
        perform: Perform,
        cancels: QueueCancels,
    ) -> None:
        """`estimate_ms(num_tokens)`: of the prefill; 0 for unknown. `on_route` hears which way each request went."""
        self._queue = queue
        self._background = background
        self._gateway_id = gateway_id
        self._endpoint = endpoint
        self._mode = mode
        self._local_max_tokens = local_max_tokens
        self._local = local
        self._estimate_ms = estimate_ms
        self._on_route = on_route
        self._timeout_s = timeout_s
        self._perform = perform
        self._cancels = cancels
        self._ended: set[tuple[str, int]] = set()
        """(request id, gen) that the last check found ended."""
        self._again = asyncio.Semaphore(_AGAIN_AT_ONCE)

    def enqueue(self, exchange: Exchange, command: Enqueue) -> None:
        """In the background. The first time a queue that refuses ends the request; later it is asked until it takes."""
        work = self._enqueue if command.gen == 1 else self._enqueue_again
        self._background.spawn(work(exchange, command))

    def cancel(self, request_id: str, gen: int) -> None:
        """Nobody waits for it any more; said until the queue has heard it."""
        self._cancels.cancel(request_id, gen)

    async def check_fates(self, exchanges: Iterable[Exchange]) -> None:
        """Asks the queue what became of those that wait there. What got lost is put in again, oldest first.

        What has ended there without a word to us (its notice got lost) ends here too, or is tried again.
        """
        waiting = [e for e in exchanges if e.session.state is State.QUEUED]
        asked = [(e.request_id, e.session.gen) for e in waiting]
        try:
            async with asyncio.timeout(self._timeout_s):
                fates = await self._queue.fates(tuple(asked)) if asked else ()
        except (QueueUnavailable, TimeoutError):
            return
        ended, self._ended = self._ended, set()
        for exchange, key, fate in zip(waiting, asked, fates, strict=True):
            session, gen = exchange.session, key[1]
            if fate.is_open or session.state is not State.QUEUED or session.gen != gen:
                continue
            if fate.state == "lost":
                log.warning("job_lost", request_id=session.request_id, gen=gen)
                self._perform(exchange, session.on_job_lost(gen), "job_lost")
            elif key in ended:
                self._end_unheard(exchange, gen, fate)
            else:
                self._ended.add(key)  # the notice may be on its way

    def _end_unheard(self, exchange: Exchange, gen: int, fate: JobFate) -> None:
        session = exchange.session
        log.warning("job_ended_unheard", request_id=session.request_id, gen=gen, state=fate.state, detail=fate.detail)
        code = CODE_OF_END.get(fate.state)
        commands = session.on_failed(
            Pair(gen=gen, attempt=0),
            code or "job_ended",
            fate.detail or f"the queue says {fate.state}, and no worker has it",
            retryable=code is None or fate.state in RETRYABLE_ENDS,
        )
        self._perform(exchange, commands, code or "job_ended")

    async def _enqueue(self, exchange: Exchange, command: Enqueue) -> None:
        try:
            await self._place(exchange, command)
        except QueueUnavailable as error:
            message = f"the request queue is unavailable: {error}"
            commands = exchange.session.on_enqueue_failed(command.gen, "queue_unavailable", message)
            if commands:  # else only the answer was lost: a worker has the job already
                self.cancel(exchange.request_id, command.gen)  # it may be queued all the same: cancel beats enqueue
            self._perform(exchange, commands)
        else:
            self._perform(exchange, exchange.session.on_enqueued(command.gen))

    async def _enqueue_again(self, exchange: Exchange, command: Enqueue) -> None:
        delay_s = _RETRY_MIN_S
        while _is_owed(exchange, command):
            try:
                await self._place(exchange, command)
            except QueueUnavailable as error:
                log.warning("enqueue_failed", request_id=exchange.request_id, gen=command.gen, error=str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _RETRY_MAX_S)
            else:
                self._perform(exchange, exchange.session.on_enqueued(command.gen))
                return

    async def _place(self, exchange: Exchange, command: Enqueue) -> None:
        """To a decode worker that prefills by itself, or into the queue."""
        exchange.enqueued_at = asyncio.get_running_loop().time()
        sampling = exchange.prompt.sampling
        num_tokens = num_ids(exchange.prompt_ids) + num_ids(command.generated_ids)
        route = choose_route(
            self._mode, num_tokens=num_tokens, local_max_tokens=self._local_max_tokens, sampling=sampling
        )
        exchange.route = route  # before anybody is asked: the whole answer can come before the word that it was taken
        if route.way is Way.LOCAL:
            if await self._start_locally(exchange, command):
                self._on_route(route)
                return
            route = Route(Way.PULL if self._mode is Way.LOCAL else self._mode, "decode_busy")
        exchange.route = route
        self._on_route(route)
        if command.gen == 1:
            await self._put(exchange, command, route.way)
            return
        async with self._again:  # not while it sleeps or asks decode workers: others need no queue for that
            if _is_owed(exchange, command):
                await self._put(exchange, command, route.way)

    async def _start_locally(self, exchange: Exchange, command: Enqueue) -> bool:
        """False: it goes into the queue. Without prefill workers the decode workers are asked until one has room."""
        delay_s = _RETRY_MIN_S
        while not await self._local.start(exchange, command):
            if self._local.can_queue:
                return False
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RETRY_MAX_S)
            if not _is_owed(exchange, command):
                break
        return True

    async def _put(self, exchange: Exchange, command: Enqueue, way: Way) -> None:
        loop = asyncio.get_running_loop()
        job = PrefillJob(
            request_id=exchange.request_id,
            gen=command.gen,
            prompt_ids=exchange.prompt_ids,
            generated_ids=command.generated_ids,
            sampling=exchange.prompt.sampling,
            deadline_s=max(0.001, exchange.session.deadline - loop.time()),
            gateway=self._endpoint,
            gateway_id=self._gateway_id,
            mode=way.value,
            tenant=exchange.tenant,
            priority=exchange.priority,
            traceparent=exchange.traceparent,
            failures=exchange.failed_prefills,
            prefill_ms=self._estimate_ms(num_ids(exchange.prompt_ids) + num_ids(command.generated_ids)),
            waited_s=loop.time() - exchange.received_at if command.gen > 1 else 0.0,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._queue.enqueue(job)
        except TimeoutError as error:
            raise QueueUnavailable(f"no answer within {self._timeout_s} s") from error


def _is_owed(exchange: Exchange, command: Enqueue) -> bool:
    """Nobody has the request under this gen, and its client waits."""
    return exchange.session.gen == command.gen and exchange.session.state is State.ENQUEUEING
