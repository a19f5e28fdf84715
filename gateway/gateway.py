"""The parts of a gateway, joined over the ports of the queue side; run until the drain is over."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable

import structlog

from broker.base import PrefillQueue, Registry, WorkerRecord
from broker.links import DeltaReceiver, DeltaSettings, NoticeInbox, NoticePeers
from broker.membership import Membership, RegistryView
from gateway.api import Api
from gateway.app import create_app
from gateway.cancels import Cancels
from gateway.context_limit import ContextLimit
from gateway.estimates import PrefillEstimates
from gateway.http_server import HttpServer
from gateway.hub import Hub
from gateway.local_start import LocalStart
from gateway.metrics import GatewayMetrics
from gateway.owner_watch import OwnerWatch
from gateway.queue_cancels import QueueCancels
from gateway.queue_metrics import QueueMetrics
from gateway.queue_side import QueueSide
from gateway.readiness import reasons_not_ready
from gateway.route import Way
from gateway.settings import GatewaySettings
from gateway.tokenizer import TextTokenizer
from pdq.runtime.background import Background, every
from pdq.runtime.signals import Drain

log = structlog.get_logger(__name__)
_LAST_WRITES_S = 5.0
"""After the last request has ended: time for its bytes, and for the last Cancels."""


class Gateway:
    def __init__(
        self,
        settings: GatewaySettings,
        *,
        gateway_id: str,
        model: str,
        mode: Way,
        tokenizer: TextTokenizer,
        queue: PrefillQueue,
        registry: Registry,
        inbox: NoticeInbox,
        peers: NoticePeers,
        delta_settings: DeltaSettings,
        metrics: GatewayMetrics,
        heartbeat_s: float,
        drain_grace_s: float,
        drain: Drain,
    ) -> None:
        """Raises StartupError when the HTTP port is taken. `queue`, `registry`, `inbox`, `peers` stay the caller's."""
        self._settings = settings
        self._id = gateway_id
        self._model = model
        self._mode = mode
        self._inbox = inbox
        self._drain_grace_s = drain_grace_s
        self._drain = drain
        self._background = Background()
        self._receiver = DeltaReceiver(delta_settings)
        self._view = RegistryView()
        cancels = Cancels(peers, self._background, metrics)
        self._hub = Hub(settings, receiver=self._receiver, cancels=cancels, metrics=metrics, view=self._view)
        self._hub.connect(
            QueueSide(
                queue,
                self._background,
                gateway_id=gateway_id,
                endpoint=inbox.endpoint,
                mode=mode,
                local_max_tokens=settings.local_max_tokens,
                local=LocalStart(
                    peers,
                    self._view,
                    gateway_id=gateway_id,
                    endpoint=inbox.endpoint,
                    silent_s=settings.silent_s,
                    rng=random.Random(),
                ),
                estimate_ms=PrefillEstimates(self._view),
                on_route=metrics.count_route,
                timeout_s=settings.queue_timeout_s,
                perform=self._hub.perform,
                cancels=QueueCancels(
                    queue,
                    self._background,
                    timeout_s=settings.queue_timeout_s,
                    give_up_s=settings.request_deadline_s,
                    on_owner=self._hub.notify_prefill_worker,
                ),
            )
        )
        self._queue_metrics = QueueMetrics(queue, metrics.registry)
        self._watch = OwnerWatch(
            settings, peers=peers, receiver=self._receiver, debts=self._hub.debts, on_dead=self._hub.on_owner_dead
        )
        limit = ContextLimit(self._view, setting=settings.max_model_len, of_model=tokenizer.max_model_len)
        api = Api(
            settings,
            model=model,
            view=self._view,
            context_limit=limit,
            tokenizer=tokenizer,
            hub=self._hub,
            metrics=metrics,
        )
        app = create_app(api, metrics=metrics, reasons=self.reasons_not_ready, api_key=settings.api_key)
        self._http = HttpServer(app, host=settings.http_host, port=settings.http_port, unread_s=settings.http_unread_s)
        self._membership = Membership(
            registry,
            self._view,
            heartbeat_s=heartbeat_s,
            config={"mode": mode.value},
            record=self._record,
            on_drain=functools.partial(drain.request, "asked through the registry"),
        )

    @property
    def url(self) -> str:
        return self._http.url

    def reasons_not_ready(self) -> list[str]:
        return reasons_not_ready(self._view, is_open=self._hub.is_open, needs_prefill=self._mode is not Way.LOCAL)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until the drain: then nothing new, answers what it has within the grace, ends the rest with an error.

        Raises QueueUnavailable when the first heartbeat fails, DoesNotFit when the model runs in another mode.
        """
        settings, hub = self._settings, self._hub
        try:
            await self._inbox.start(hub.on_notice)
            await self._drain.unless_requested(self._membership.join())
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._membership.run()),
                    group.create_task(every(settings.tick_s, hub.tick, name="tick")),
                    group.create_task(every(settings.owner_check_s, self._watch.check, name="owner_watch")),
                    group.create_task(every(settings.lost_check_s, hub.check_fates, name="fates_check")),
                    group.create_task(every(settings.queue_metrics_s, self._queue_metrics.poll, name="queue_metrics")),
                ]
                serving = group.create_task(self._http.serve())
                await self._http.started()
                on_ready()
                await self._drain.wait()
                self._http.stop()
                await hub.drain(self._drain_grace_s)
                await asyncio.wait([serving], timeout=_LAST_WRITES_S)
                await self._background.settled(_LAST_WRITES_S)
                for task in (*loops, serving):
                    task.cancel()
        finally:
            self._http.close()
            await self._membership.leave()
            await self._background.close()
            await self._receiver.close()

    def _record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self._id,
            role="gateway",
            state="ready" if self._hub.is_open else "draining",
            endpoint=self._inbox.endpoint,
            model=self._model,
            fingerprint="",
            running=self._hub.num_in_flight - self._hub.num_waiting,
            waiting=self._hub.num_waiting,
            http=self._http.url,
        )
