"""One engine, one step at a time: scheduler, connector halves and runner in vLLM's order. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from connector.layout import KvRegion
from connector.step import Scheduled
from engine.base import EngineRequest, EngineStats, StepOutputs
from engine.embedded.block_pool import BlockPool
from engine.embedded.connector_port import SchedulerPort, WorkerPort
from engine.embedded.intake import Limits
from engine.embedded.messages import Abort, Release
from engine.embedded.runner import Chunk, Runner
from engine.embedded.scheduler import Scheduler
from engine.embedded.settings import EngineSettings

_log = structlog.get_logger(__name__)


class CoreFailed(Exception):
    """The engine can't go on; what it holds is lost."""


class EngineCore:
    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner,
        scheduler_half: SchedulerPort,
        worker_half: WorkerPort,
        *,
        pool: BlockPool,
        regions: list[KvRegion],
        limits: Limits,
    ) -> None:
        """The worker half has `regions` registered already."""
        self.pool = pool
        self.scheduler = Scheduler(settings, pool, scheduler_half, limits=limits, eos_token_ids=runner.eos_token_ids)
        self.runner = runner
        self._scheduler_half = scheduler_half
        self._worker_half = worker_half
        self._layer_names = _layer_names(regions, runner.num_layers)
        self._num_steps = 0
        self.on_layer: Callable[[], None] = lambda: None
        """Called after each layer: a long step can tell that it moves."""
        self._is_busy = False

    def handle(self, message: EngineRequest | Abort | Release) -> None:
        """A step must follow: what the message changed is told to the connector, and released ids come out, there."""
        match message:
            case EngineRequest():
                self.scheduler.add(message)
            case Abort(engine_request_id=engine_request_id):
                self.scheduler.abort(engine_request_id)
            case Release(engine_request_id=engine_request_id):
                self.scheduler.release(engine_request_id)
        self._is_busy = True

    @property
    def is_busy(self) -> bool:
        """Another step now would do something. False: only a message or the connector can change that."""
        return self._is_busy or self._scheduler_half.has_pending_meta()

    def step(self) -> StepOutputs:
        """One step, also with nothing to compute: the connector's news are taken over. Raises CoreFailed."""
        scheduler, scheduler_half, worker_half = self.scheduler, self._scheduler_half, self._worker_half
        # vLLM asks after the forward; asked before, what has just been loaded is decoded in this very step.
        transfers = worker_half.get_transfer_results()
        if transfers.fatal is not None:
            raise CoreFailed(f"the connector can't give KV blocks back safely: {transfers.fatal}")
        if not transfers.is_empty:
            scheduler.on_transfers(transfers)
        scheduler.fail_gone(scheduler_half.take_gone())
        chunks = scheduler.schedule()
        self._pass_metadata(chunks)
        results = self.runner.run(chunks, self._before_layer, self._after_layer) if chunks else []
        worker_half.wait_for_save()
        worker_half.clear_connector_metadata()
        scheduler.update(chunks, results)
        if scheduler_half.has_pending_meta():
            # An empty step in vLLM: a finished prefill is known to the worker half before its ticket leaves.
            self._pass_metadata()
            worker_half.clear_connector_metadata()
        worker_half.hurry_releases(self.pool.num_free * 2 < self.pool.num_blocks)
        outputs, released = scheduler.take_news()
        self._num_steps += 1
        # Blocks that came free may let the head of the queue in: one more step.
        self._is_busy = scheduler.can_compute or (scheduler.has_waiting and bool(chunks or released or outputs))
        return StepOutputs(outputs=outputs, released=released, stats=self.stats())

    def _pass_metadata(self, chunks: Sequence[Chunk] = ()) -> None:
        worker_half = self._worker_half
        preempted, self.scheduler.preempted = self.scheduler.preempted, []
        meta = self._scheduler_half.build_connector_meta(map(_scheduled, chunks), preempted)
        worker_half.handle_preemptions(meta)
        worker_half.bind_connector_metadata(meta)
        # vLLM 0.32 launches the forward first, but its forward is asynchronous; ours would delay the loads by a step.
        worker_half.start_load_kv()

    def stats(self) -> EngineStats:
        """`step` counts idle steps and layers too: it stands still only while a step, or the loop, is stuck."""
        running, waiting, pinned = self.scheduler.counts()
        return EngineStats(
            step=self._num_steps,
            total_blocks=self.pool.num_blocks,
            free_blocks=self.pool.num_free,
            running=running,
            waiting=waiting,
            pinned=pinned,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Connector before memory: nobody may touch the blocks when the runner drops them."""
        self._scheduler_half.shutdown()
        self._worker_half.shutdown()
        self.runner.close()

    def _before_layer(self, layer: int) -> None:
        for name in self._layer_names[layer]:
            self._worker_half.wait_for_layer_load(name)

    def _after_layer(self, layer: int) -> None:
        for name in self._layer_names[layer]:
            self._worker_half.save_kv_layer(name)
        self._num_steps += 1
        self.on_layer()


def _scheduled(chunk: Chunk) -> Scheduled:
    sequence = chunk.sequence
    return Scheduled(sequence.engine_request_id, sequence.block_ids, sequence.num_computed + chunk.num_tokens)


def _layer_names(regions: list[KvRegion], num_layers: int) -> list[tuple[str, ...]]:
    """The connector's names of each layer; one region for all layers is final after the last one."""
    names = [region.layer for region in regions]
    if len(names) == num_layers:
        return [(name,) for name in names]
    if len(names) != 1:
        raise ValueError(f"{len(names)} KV regions for {num_layers} layers: expected one, or one per layer")
    return [()] * (num_layers - 1) + [(names[0],)]
