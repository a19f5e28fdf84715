"""Engines of several ranks: one scheduler half, a worker half and memory per rank, driven in the engine's order.

What a block holds is a function of (request, block, layer, head), so each rank's bytes can be told from all others'.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from connector.layout import KvRegion
from connector.params import PullProducer, PushConsumer, PushProducer, params_of
from connector.scheduler_half import SchedulerHalf
from connector.settings import ConnectorSettings
from connector.step import Scheduled, TransferResults
from connector.tp_plan import heads_of
from connector.worker_half import WorkerHalf
from pdq.wire.types import KvSource
from tests.connector.faulty import FaultyTransport
from tests.connector.worlds import BLOCK_SIZE, FIRST, PATIENT, Memory
from tests.servers import free_ports

CELL = 64
LAYERS = 3


class RankMemory(Memory):
    """Layer-major; a layer of a block is this rank's heads, one cell each."""

    def __init__(self, num_blocks: int, rank: int, tp_size: int, num_kv_heads: int) -> None:
        self.first_head, self.num_heads = heads_of(rank, tp_size, num_kv_heads)
        super().__init__(num_blocks, LAYERS * self.num_heads * CELL, LAYERS)

    @property
    def regions(self) -> list[KvRegion]:
        heads = {"num_heads": self.num_heads, "first_head": self.first_head}
        return [replace(region, **heads) for region in super().regions]

    def share_of(self, request_id: str, index: int) -> bytes:
        """Of block `index` of the request."""
        cells = [
            random.Random(zlib.crc32(f"{request_id}/{index}/{layer}/{head}".encode())).randbytes(CELL)
            for layer in range(LAYERS)
            for head in range(self.first_head, self.first_head + self.num_heads)
        ]
        return b"".join(cells)

    def write(self, request_id: str, block_ids: Sequence[int]) -> None:
        for index, block_id in enumerate(block_ids):
            self.fill(block_id, self.share_of(request_id, index))

    def holds(self, request_id: str, block_ids: Sequence[int]) -> bool:
        return all(self.block(block_id) == self.share_of(request_id, i) for i, block_id in enumerate(block_ids))


class Ranks:
    """One engine of `tp_size` ranks."""

    def __init__(
        self,
        name: str,
        transports: Sequence[FaultyTransport],
        *,
        role: str,
        num_kv_heads: int,
        settings: ConnectorSettings = PATIENT,
        num_blocks: int = 32,
    ) -> None:
        self.transports = transports
        self.tp_size = tp_size = len(transports)
        self.name, self.epoch = name, f"{name}-{random.randrange(2**32):08x}"
        self.progress = threading.Event()
        self.port = free_ports(tp_size)
        self.memories = [RankMemory(num_blocks, rank, tp_size, num_kv_heads) for rank in range(tp_size)]
        self.workers = [
            WorkerHalf(
                settings,
                engine_id=name,
                epoch=self.epoch,
                host="127.0.0.1",
                side_channel_port=self.port,
                rank=rank,
                tp_size=tp_size,
                transport=transport,
                fingerprint=f"model=tiny tp={tp_size}",
                on_progress=self.progress.set,
                num_kv_heads=num_kv_heads,
            )
            for rank, transport in enumerate(transports)
        ]
        self.scheduler = SchedulerHalf(
            settings,
            engine_id=name,
            epoch=self.epoch,
            host="127.0.0.1",
            side_channel_port=self.port,
            tp_size=tp_size,
            block_size=BLOCK_SIZE,
            role=role,  # type: ignore[arg-type]
            on_progress=self.progress.set,
        )
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.register_kv_caches(memory.regions)
        self._reported: Counter[tuple[str, str]] = Counter()
        self.sent_by: dict[str, set[int]] = {}
        """Ranks that are through with it, by id."""
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: dict[str, str] = {}
        self.num_bytes: Counter[str] = Counter()

    @property
    def source(self) -> KvSource:
        return KvSource(
            engine_id=self.name,
            epoch=self.epoch,
            host="127.0.0.1",
            port=self.port,
            tp_size=self.tp_size,
            block_size=BLOCK_SIZE,
        )

    def step(self, scheduled: Sequence[Scheduled] = (), forward: Callable[[RankMemory], None] | None = None) -> None:
        """One step on all ranks; `forward` is run on each one's memory before the layers' hooks."""
        meta = self.scheduler.build_connector_meta(scheduled)
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
            worker.start_load_kv()
            if forward is not None:
                forward(memory)
                for layer in memory.layers:
                    worker.save_kv_layer(layer)
            worker.wait_for_save()
        self._collect([worker.get_transfer_results() for worker in self.workers])
        for worker in self.workers:
            worker.clear_connector_metadata()

    def _collect(self, results: Sequence[TransferResults]) -> None:
        """An id counts once every rank has reported it, as in vLLM's aggregation over workers."""
        for rank, result in enumerate(results):
            self._reported.update(("sent", request_id) for request_id in result.finished_sending)
            self._reported.update(("received", request_id) for request_id in result.finished_recving)
            self.failed |= result.failed_recving
            for request_id in result.finished_sending:
                self.sent_by.setdefault(request_id, set()).add(rank)
            for request_id, stats in result.stats.items():
                self.num_bytes[request_id] += stats.num_bytes
        complete = [found for found, count in self._reported.items() if count == self.tp_size]
        for found in complete:
            del self._reported[found]
        joined = TransferResults(
            finished_sending=frozenset(request_id for what, request_id in complete if what == "sent"),
            finished_recving=frozenset(request_id for what, request_id in complete if what == "received"),
        )
        waited_for = self.scheduler.update_connector_output(joined)
        self.sent += waited_for.finished_sending
        self.received += waited_for.finished_recving

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Steps whenever there is news, until the condition holds."""
        deadline = time.monotonic() + limit_s
        while not condition():
            self.step()
            if condition():
                return
            left_s = deadline - time.monotonic()
            assert left_s > 0, "condition not met in time"
            self.progress.wait(min(left_s, 0.5))
            self.progress.clear()

    # P

    def prefill(self, request_id: str, block_ids: list[int], num_tokens: int) -> tuple[str, dict[str, object]]:
        """Pull: a whole prefill; (engine request id, KV params for D)."""
        engine_request_id = f"{request_id}:1:1"
        params = params_of(PullProducer(transfer_id=request_id, pair=FIRST))
        self.scheduler.on_new_request(engine_request_id, params, num_tokens)
        self.scheduler.update_state_after_alloc(engine_request_id, [], 0)
        self.step(forward=lambda memory: memory.write(request_id, block_ids))
        is_kept, ticket = self.scheduler.request_finished(engine_request_id, block_ids, "prefilled")
        assert is_kept
        assert ticket is not None
        self.step()
        return engine_request_id, ticket

    def push(
        self,
        request_id: str,
        block_ids: list[int],
        num_tokens: int,
        *,
        chunk: int = 10**9,
        finish: str = "prefilled",
    ) -> str:
        """A whole prefill in chunks; any other `finish` comes after the first chunk."""
        engine_request_id = f"{request_id}:1:1"
        params = params_of(PushProducer(transfer_id=request_id, pair=FIRST))
        self.scheduler.on_new_request(engine_request_id, params, num_tokens)
        for end in range(min(chunk, num_tokens), num_tokens + chunk, chunk):
            done = min(end, num_tokens)
            written = block_ids[: -(-done // BLOCK_SIZE)]

            def forward(memory: RankMemory, written: list[int] = written) -> None:
                memory.write(request_id, written)

            self.step([Scheduled(engine_request_id, block_ids, done)], forward)
            if finish != "prefilled":
                break
        assert self.scheduler.request_finished(engine_request_id, block_ids, finish) == (True, None)
        self.step()
        return engine_request_id

    # D

    def load(self, name: str, params: dict[str, object], block_ids: list[int], num_tokens: int, cached: int = 0) -> int:
        """Admits, allocates and starts; returns how many tokens come from P."""
        self.scheduler.on_new_request(name, params, num_tokens)
        external, _ = self.scheduler.get_num_new_matched_tokens(name, num_tokens, cached)
        assert external is not None
        self.scheduler.update_state_after_alloc(name, block_ids, external)
        self.step()
        return external

    def receive(
        self, name: str, source: KvSource, request_id: str, block_ids: list[int], num_tokens: int, cached: int = 0
    ) -> int:
        params = params_of(PushConsumer(transfer_id=request_id, pair=FIRST, source=source))
        return self.load(name, params, block_ids, num_tokens, cached)

    def holds(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Each rank's share of the request is in these blocks."""
        return all(memory.holds(request_id, block_ids) for memory in self.memories)

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
