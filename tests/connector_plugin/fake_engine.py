"""One vLLM engine around the plugin: scheduler, ranks, and all that vLLM does to a connector's values in between."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.tp_plan import heads_of
from connector.vllm_plugin.news import joined_news
from connector.vllm_plugin.settings import PluginSettings
from connector.vllm_plugin.worker import PluginWorker
from tests.connector.faulty import FaultyTransport
from tests.connector_plugin.configs import kv_cache_config, vllm_config
from tests.connector_plugin.fake_pool import KvMemory, chain
from tests.connector_plugin.fake_scheduler import FakeScheduler, Request
from tests.connector_plugin.fake_vllm import KVConnectorOutput, SchedulerOutput
from tests.connector_plugin.tensors import kv_tensors

LAYERS = ("layers.0", "layers.1")
BLOCK_SIZE = 4
NUM_HEADS = 2


@dataclass
class Rank:
    connector: Any
    memory: KvMemory
    transport: FaultyTransport


class FakeEngine:
    def __init__(
        self,
        plugin: ModuleType,
        fabric: MemoryFabric,
        *,
        role: str,
        port: int,
        settings: dict[str, Any],
        connector: str = "PdqMooncakeLayerwiseConnector",
        num_blocks: int = 24,
        tp_size: int = 1,
        recompute: bool = False,
        budget: int = 16,
    ) -> None:
        """`settings`: of the connector. `budget`: tokens a step."""
        self.plugin = plugin
        self._is_current = plugin.GENERATION.has_failed_recving
        extra = {"pdq_connector": settings}
        self.config = vllm_config(
            role=role, port=port, engine_id=f"{role}-{port}", extra=extra, tp_size=tp_size, num_kv_heads=NUM_HEADS
        )
        kv_config = kv_cache_config(layers=LAYERS, block_size=BLOCK_SIZE, num_blocks=num_blocks)
        base = getattr(plugin, connector)
        roles = plugin.base.KVConnectorRole
        self.ranks = [self._rank(base, fabric, index, tp_size, num_blocks, kv_config) for index in range(tp_size)]
        self.scheduler = FakeScheduler(
            base(self.config, roles.SCHEDULER, kv_config),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            recompute=recompute,
            budget=budget,
            is_current=self._is_current,
        )
        self._aggregate = _Aggregator(tp_size)
        self.num_steps = 0

    @property
    def epoch(self) -> str:
        return f"{self.config.kv_transfer_config.engine_id}-{self.config.instance_id}"

    @property
    def news(self) -> dict[str, Any]:
        """All that came out so far."""
        return joined_news(self.scheduler.news)

    def turn(self) -> None:
        """As vLLM's loop: a step if there is anything that could come of it."""
        if self.scheduler.has_requests():
            self.step()

    def step(self, meanwhile: Callable[[], None] | None = None) -> None:
        """`meanwhile`: what comes in while the model computes, such as aborts."""
        self.num_steps += 1
        output = self.scheduler.schedule()
        results = [self._run(rank, pickle.loads(pickle.dumps(output))) for rank in self.ranks]
        if meanwhile is not None:
            meanwhile()
        self.scheduler.update(output, self._aggregate(results))

    def close(self) -> None:
        for connector in (self.scheduler.connector, *(rank.connector for rank in self.ranks)):
            connector.shutdown()
            connector.shutdown()

    def _run(self, rank: Rank, output: SchedulerOutput) -> KVConnectorOutput:
        connector, step = rank.connector, output.kv_connector_metadata
        connector.handle_preemptions(step)
        connector.bind_connector_metadata(step)
        if not self._is_current:
            connector.start_load_kv(None)
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        work = [(request, chain(request.ids), output.num_scheduled_tokens[request.request_id]) for request in requests]
        for layer in LAYERS if work else ():
            connector.wait_for_layer_load(layer)
            for request, links, num_new in work:
                self._compute(rank, layer, request, links, num_new)
            connector.save_kv_layer(layer, rank.memory.tensors[layer], None)
        if self._is_current:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = KVConnectorOutput()
        if self._is_current:
            transfers = connector.get_transfer_results(output.finished_req_ids)
            results.finished_sending = transfers.finished_sending
            results.finished_recving = transfers.finished_recving
            results.failed_recving = transfers.failed_recving
        else:
            results.finished_sending, results.finished_recving = connector.get_finished(output.finished_req_ids)
        results.invalid_block_ids = connector.get_block_ids_with_load_errors()
        results.kv_connector_stats = connector.get_kv_connector_stats()
        results.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        sent: KVConnectorOutput = pickle.loads(pickle.dumps(results))
        return sent

    def _compute(self, rank: Rank, layer: str, request: Request, links: list[bytes], num_new: int) -> None:
        """Reads all KV before the chunk, as attention does, and writes the chunk's."""
        end = request.num_computed_tokens
        if wrong := rank.memory.wrong_positions(layer, links, request.blocks, end - num_new):
            raise AssertionError(f"{request.request_id} {layer}: KV of positions {wrong} is not that of its tokens")
        rank.memory.write(layer, links, request.blocks, end - num_new, end)

    def _rank(self, base: Any, fabric: MemoryFabric, index: int, tp_size: int, num_blocks: int, kv_config: Any) -> Rank:
        transport = FaultyTransport(MemoryTransport(fabric))
        generation = self.plugin.GENERATION

        class Ranked(base):  # type: ignore[misc]
            @classmethod
            def new_worker(cls, vllm_config: Any, settings: PluginSettings) -> PluginWorker:
                return PluginWorker(settings, generation, rank=index, transport=transport, fingerprint="model=tiny")

        first_head, num_heads = heads_of(index, tp_size, NUM_HEADS)
        tensors = kv_tensors(LAYERS, num_blocks=num_blocks, num_heads=num_heads, block_size=BLOCK_SIZE)
        connector = Ranked(self.config, self.plugin.base.KVConnectorRole.WORKER, kv_config)
        connector.register_kv_caches(tensors)
        return Rank(connector, KvMemory(tensors, first_head=first_head, block_size=BLOCK_SIZE), transport)


class _Aggregator:
    """vLLM's KVOutputAggregator."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._counts: dict[tuple[str, str], int] = {}
        self._seen: set[tuple[int, str, str]] = set()
        self._failed: set[str] = set()

    def __call__(self, outputs: list[KVConnectorOutput]) -> KVConnectorOutput:
        joined = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        for rank, output in enumerate(outputs):
            for kind in ("finished_sending", "finished_recving"):
                for request_id in getattr(output, kind) or ():
                    assert (rank, kind, request_id) not in self._seen, f"rank {rank} reports {request_id} again"
                    self._seen.add((rank, kind, request_id))
                    self._counts[kind, request_id] = self._counts.get((kind, request_id), 0) + 1
                    if self._counts[kind, request_id] == self._num_ranks:
                        del self._counts[kind, request_id]
                        getattr(joined, kind).add(request_id)
            for kind in ("kv_connector_stats", "kv_connector_worker_meta"):
                value, known = getattr(output, kind), getattr(joined, kind)
                if value is not None:
                    setattr(joined, kind, value if known is None else known.aggregate(value))
            joined.invalid_block_ids |= output.invalid_block_ids
            self._failed |= output.failed_recving
        assert joined.finished_recving is not None
        joined.failed_recving = self._failed & joined.finished_recving
        self._failed -= joined.failed_recving
        return joined
