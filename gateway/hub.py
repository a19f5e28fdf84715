"""The table of all requests in flight: hands events to their sessions and carries out what the sessions command.

Events come from notices (Admit, Deltas, Failed, PromptLogprobs), the clock, the owner watch, the queue and HTTP.
Everything here runs in one event loop; nothing awaits between an event and the last of its commands.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

import structlog

from broker.links import DeltaReceiver, NoticeReply
from broker.membership import RegistryView
from broker.messages import Ack, Admit, Deltas, Failed, Go, Gone, Notice, PromptLogprobs
from gateway.cancels import ANY_ATTEMPT, Cancels
from gateway.commands import Command, Emit, Enqueue, Fail, Finish, QueueCancel, Refuse, SendCancel
from gateway.endpoints import Endpoints
from gateway.errors import GatewayError
from gateway.exchange import Exchange
from gateway.forgotten import take_list
from gateway.metrics import GatewayMetrics
from gateway.migration import note_migration
from gateway.owner_watch import Debt
from gateway.queue_side import QueueSide
from gateway.session import State
from gateway.settings import GatewaySettings
from pdq.wire.types import Pair

_LEFT_S: Final = 900.0
"""A decode worker that owes nothing and is silent for so long has left."""
log = structlog.get_logger(__name__)


class Hub:
    def __init__(
        self,
        settings: GatewaySettings,
        *,
        receiver: DeltaReceiver,
        cancels: Cancels,
        metrics: GatewayMetrics,
        view: RegistryView,
    ) -> None:
        """Call `connect` before the first request."""
        self._settings = settings
        self._receiver = receiver
        self._cancels = cancels
        self._metrics = metrics
        self._view = view
        self._endpoints = Endpoints(view)
        self._queue: QueueSide | None = None
        self._exchanges: dict[str, Exchange] = {}
        self._waiting: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self.is_open = True
        metrics.watch(lambda: self.num_in_flight, lambda: self.num_waiting)

    def connect(self, queue: QueueSide) -> None:
        self._queue = queue

    @property
    def num_in_flight(self) -> int:
        return len(self._exchanges)

    @property
    def num_waiting(self) -> int:
        """Without a decode worker."""
        return len(self._waiting)

    # --- what HTTP asks for ---

    def check_room(self, num_prompts: int) -> None:
        """Raises GatewayError when this gateway should not take so many more prompts."""
        if not self.is_open:
            raise GatewayError("shutting_down", "this gateway is shutting down")
        if len(self._exchanges) + num_prompts > self._settings.max_in_flight:
            raise GatewayError("overloaded", f"{len(self._exchanges)} requests are in flight (max_in_flight)")
        if len(self._waiting) + num_prompts > self._settings.max_queued:
            raise GatewayError("overloaded", f"{len(self._waiting)} requests are waiting (max_queued)")

    def open(self, exchange: Exchange) -> None:
        """Enqueues it in the background: neither its deadline nor a client that leaves waits for the queue's word."""
        self._exchanges[exchange.request_id] = exchange
        self._waiting.add(exchange.request_id)
        self._emptied.clear()
        self._metrics.prompt_tokens.inc(len(exchange.prompt.token_ids))
        self.perform(exchange, exchange.session.start())

    def stop_string(self, exchange: Exchange) -> None:
        self.perform(exchange, exchange.session.on_stop_string())

    def client_gone(self, exchange: Exchange) -> None:
        """Idempotent; nothing happens when it has ended."""
        self.perform(exchange, exchange.session.on_client_gone())

    # --- notices ---

    def on_notice(self, message: Notice, reply: NoticeReply) -> None:
        """The inbox's handler."""
        match message:
            case Deltas():
                self._on_deltas(message, reply)
            case Admit():
                self._on_admit(message, reply)
            case Failed():
                self._on_failed(message)
                reply(Ack(request_id=message.request_id, pair=message.pair))
            case PromptLogprobs():
                exchange = self._exchanges.get(message.request_id)
                if exchange is not None and message.pair.gen == exchange.session.gen:
                    exchange.prompt_logprobs = message.positions
                reply(Ack(request_id=message.request_id, pair=message.pair))
            case _:
                log.warning("unexpected_notice", kind=type(message).__name__)

    def _on_deltas(self, message: Deltas, reply: NoticeReply) -> None:
        now = self._loop.time()
        worker = message.worker
        if not self._receiver.feed(message, reply):
            return
        for delta in message.items:
            exchange = self._exchanges.get(delta.request_id)
            if exchange is None:
                self._refuse(worker, delta.request_id, delta.pair)
                continue
            commands = exchange.session.on_delta(worker, delta)
            if commands and type(commands[0]) is Emit:
                self._deliver(exchange, commands[0], now)
                del commands[0]
            for command in commands:
                if isinstance(command, Refuse):
                    self._refuse(worker, delta.request_id, command.pair)
                    commands = []
            if commands:
                self.perform(exchange, commands, "delta")
        if message.owes is not None:
            code, detail = "request_forgotten", f"decode worker {worker} has forgotten the request"
            for exchange, pair in take_list(self._exchanges.values(), message):
                self.perform(exchange, exchange.session.on_failed(pair, code, detail, retryable=True), code)

    def _on_admit(self, admit: Admit, reply: NoticeReply) -> None:
        exchange = self._exchanges.get(admit.request_id)
        is_go, commands = (
            (False, []) if exchange is None else exchange.session.on_admit(admit.pair, admit.worker, admit.endpoint)
        )
        self._metrics.admits.labels("go" if is_go else "gone").inc()
        if exchange is None or not is_go:
            reply(Gone(request_id=admit.request_id, pair=admit.pair, reason="no right to answer this request"))
            if exchange is not None and commands:
                self.perform(exchange, commands, "admit_conflict")
            return
        reply(Go(request_id=admit.request_id, pair=admit.pair))
        if exchange.admit is None or exchange.admit.pair != admit.pair:
            self._metrics.queue_wait.observe(admit.queue_wait_s)
            self._metrics.prefill.observe(admit.prefill_s)
        exchange.admit, exchange.is_unlisted = admit, False
        exchange.admitted_at = self._loop.time()
        self._endpoints.saw(admit.worker, admit.endpoint)
        self._waiting.discard(admit.request_id)
        self.perform(exchange, commands)
        log.debug("request_admitted", request_id=admit.request_id, pair=str(admit.pair), decode_worker=admit.worker)

    def _on_failed(self, failed: Failed) -> None:
        exchange = self._exchanges.get(failed.request_id)
        if exchange is None:
            return
        commands = exchange.session.on_failed(failed.pair, failed.code, failed.detail, retryable=failed.retryable)
        if not commands:  # told before, or news of a pair that decides nothing
            return
        told = {"worker": failed.worker, "code": failed.code, "detail": failed.detail}
        log.warning("attempt_failed", request_id=failed.request_id, pair=str(failed.pair), **told)
        self.perform(exchange, commands, failed.code)

    # --- clock, owners, shutdown ---

    async def tick(self) -> None:
        """Deadlines, alarms, and what is not worth remembering any more."""
        now = self._loop.time()
        for exchange in list(self._exchanges.values()):
            if exchange.bell.alarm_at <= now:
                exchange.bell.alarm_at = math.inf
                exchange.bell.ring()
            if exchange.session.deadline <= now:
                self._metrics.deadlines.labels(exchange.session.state.value).inc()
                self.perform(exchange, exchange.session.on_tick(now))
        self._cancels.tick(now)

    def debts(self) -> dict[str, Debt]:
        """What each decode worker owes us."""
        debts: dict[str, Debt] = {}
        for exchange in self._exchanges.values():
            owner = exchange.session.owner
            if owner is None:
                continue
            known = debts.get(owner.worker)
            token_at = exchange.last_token_at if exchange.session.state is State.STREAMING else None
            admitted_at = exchange.admitted_at
            if known is not None:
                admitted_at = min(admitted_at, known.admitted_at)
                token_at = max(filter(None, (token_at, known.token_at)), default=None)
            debts[owner.worker] = Debt(endpoint=owner.endpoint, admitted_at=admitted_at, token_at=token_at)
        return debts

    def on_owner_dead(self, worker: str, reason: str) -> None:
        self._metrics.dead_owners.labels(reason).inc()
        for exchange in list(self._exchanges.values()):
            commands = exchange.session.on_owner_dead(worker)
            self.perform(exchange, commands, "decode_worker_lost")
        self._receiver.forget(worker)

    async def check_fates(self) -> None:
        """Of what waits in the queue. Workers that left long ago are forgotten at this pace, too."""
        assert self._queue is not None
        self._receiver.forget_silent(_LEFT_S)
        await self._queue.check_fates(list(self._exchanges.values()))

    async def drain(self, grace_s: float) -> None:
        """Nothing new; waits for what is in flight, then ends the rest with an error."""
        self.is_open = False
        try:
            async with asyncio.timeout(grace_s):
                await self._emptied.wait()
        except TimeoutError:
            log.warning("drain_grace_over", requests=len(self._exchanges))
        for exchange in list(self._exchanges.values()):
            self.perform(exchange, exchange.session.on_shutdown())

    # --- commands ---

    def perform(self, exchange: Exchange, commands: list[Command], reason: str = "") -> None:
        """Carries out a session's commands, in order. `reason`: why it moves on to its next gen, if it does."""
        assert self._queue is not None
        if reason and any(isinstance(command, Enqueue) for command in commands):
            note_migration(exchange, reason, self._metrics, self._view)
        for command in commands:
            match command:
                case Emit():
                    self._deliver(exchange, command, self._loop.time())
                case Finish() | Fail():
                    self._end(exchange, command)
                case Enqueue():
                    self._waiting.add(exchange.request_id)
                    self._queue.enqueue(exchange, command)
                case QueueCancel(gen=gen):
                    self._queue.cancel(exchange.request_id, gen)
                case SendCancel(owner=owner, reason=reason):
                    self._cancels.send(owner.endpoint, exchange.request_id, owner.pair, reason)
                    # A dead owner frees nothing at P.
                    self._cancel_at(exchange.kv_holder(owner.pair), exchange.request_id, owner.pair, reason)
                case Refuse():  # answered where the delta's sender is known
                    pass

    def notify_prefill_worker(self, worker: str, request_id: str, gen: int) -> None:
        """The job that it works on was cancelled."""
        self._cancel_at(worker, request_id, Pair(gen=gen, attempt=ANY_ATTEMPT), "cancelled")

    def _cancel_at(self, worker: str | None, request_id: str, pair: Pair, reason: str) -> None:
        endpoint = None if worker is None else self._endpoints.of(worker)
        if endpoint is not None:
            self._cancels.send(endpoint, request_id, pair, reason)

    def _deliver(self, exchange: Exchange, emit: Emit, now: float) -> None:
        num_tokens = len(emit.token_ids)
        if exchange.first_token_at is None:
            exchange.first_token_at = now
            exchange.first_admit = exchange.admit
            self._metrics.ttft.observe(now - exchange.received_at)
        else:
            self._metrics.itl.observe((now - exchange.last_token_at) / num_tokens, num_tokens)
        exchange.last_token_at = now
        self._metrics.generated_tokens.count += num_tokens
        exchange.emits.append(emit)
        if exchange.is_impatient:
            exchange.bell.ring()

    def _end(self, exchange: Exchange, end: Finish | Fail) -> None:
        exchange.end = end
        del self._exchanges[exchange.request_id]
        self._waiting.discard(exchange.request_id)
        if not self._exchanges:
            self._emptied.set()
        if isinstance(end, Finish):
            self._metrics.cached_tokens.inc(exchange.cached_tokens)
            if end.stats is not None and end.stats.transfer is not None:
                self._metrics.kv_bytes.inc(end.stats.transfer.num_bytes)
        exchange.bell.ring()

    def _refuse(self, worker: str, request_id: str, pair: Pair) -> None:
        self._metrics.refused_deltas.inc()
        endpoint = self._endpoints.of(worker)
        if endpoint is not None:
            self._cancels.send(endpoint, request_id, pair, "no_right_to_answer")
