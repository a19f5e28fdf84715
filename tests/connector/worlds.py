"""An engine's memory and both halves, driven in the engine's order: what the tests stand on."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from connector.layout import KvRegion
from connector.params import PullProducer, PushConsumer, PushProducer, params_of
from connector.scheduler_half import SchedulerHalf
from connector.settings import ConnectorSettings
from connector.step import Scheduled, TransferResults
from connector.transport import Transport
from connector.worker_half import WorkerHalf
from pdq.wire.types import KvSource, Pair

FINGERPRINT = "model=tiny dtype=float32 block_size=16"
BLOCK_SIZE = 16
FIRST = Pair(gen=1, attempt=1)
PATIENT = ConnectorSettings(
    kv_lease_s=90.0, kv_hold_s=90.0, kv_wait_s=90.0, kv_answer_s=0.1, kv_answer_tries=600, kv_preempt_wait_s=60.0
)
"""No time runs out within `until`: what comes, comes by itself, and a busy machine counts for nobody's death."""
SHORT_LEASES = replace(PATIENT, kv_lease_s=5.0, kv_hold_s=6.0, kv_answer_tries=40)
"""For what is to outlive a hold and a lease, kept by renewals."""
SOON_ALONE = replace(PATIENT, kv_answer_tries=5)
"""For whoever is to find out that a peer is gone."""


class Memory:
    """KV memory of one region that holds all layers of a block; or layer-major, one region per layer."""

    def __init__(self, num_blocks: int, block_bytes: int, num_layers: int = 1) -> None:
        self.num_blocks, self.block_bytes, self.num_layers = num_blocks, block_bytes, num_layers
        self._buffer = ctypes.create_string_buffer(num_blocks * block_bytes)
        self.view = memoryview(self._buffer).cast("B")

    @property
    def regions(self) -> list[KvRegion]:
        return [
            KvRegion(
                layer=layer,
                base_address=ctypes.addressof(self._buffer) + index * self.num_blocks * self.layer_bytes,
                block_stride_bytes=self.layer_bytes,
                num_blocks=self.num_blocks,
                storage_address=ctypes.addressof(self._buffer),
                storage_bytes=self.num_blocks * self.block_bytes,
            )
            for index, layer in enumerate(self.layers)
        ]

    @property
    def layers(self) -> list[str]:
        return ["all"] if self.num_layers == 1 else [f"layers.{index}" for index in range(self.num_layers)]

    @property
    def layer_bytes(self) -> int:
        return self.block_bytes // self.num_layers

    def fill(self, block_id: int, data: bytes) -> None:
        """`data`: layer after layer."""
        for layer in range(self.num_layers):
            self.fill_layer(block_id, layer, data[layer * self.layer_bytes : (layer + 1) * self.layer_bytes])

    def fill_layer(self, block_id: int, layer: int, data: bytes) -> None:
        start = (layer * self.num_blocks + block_id) * self.layer_bytes
        self.view[start : start + self.layer_bytes] = data

    def block(self, block_id: int) -> bytes:
        starts = [(layer * self.num_blocks + block_id) * self.layer_bytes for layer in range(self.num_layers)]
        return b"".join(bytes(self.view[start : start + self.layer_bytes]) for start in starts)

    def scribble(self, block_ids: list[int], seed: int) -> list[bytes]:
        """Random bytes into these blocks; returns them."""
        rng = random.Random(seed)
        written = [rng.randbytes(self.block_bytes) for _ in block_ids]
        for block_id, data in zip(block_ids, written, strict=True):
            self.fill(block_id, data)
        return written


class World:
    """One engine: memory, both halves, and the loop that drives them."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        role: str,
        settings: ConnectorSettings = PATIENT,
        num_blocks: int = 64,
        block_bytes: int = 1024,
        num_layers: int = 1,
        fingerprint: str = FINGERPRINT,
        epoch: str | None = None,
        port: int = 0,
    ) -> None:
        self.memory = Memory(num_blocks, block_bytes, num_layers)
        self.progress = threading.Event()
        self.name = name
        self.epoch = epoch = epoch or f"{name}-{random.randrange(2**32):08x}"
        self.worker = WorkerHalf(
            settings,
            engine_id=name,
            epoch=epoch,
            host="127.0.0.1",
            side_channel_port=port,
            rank=0,
            tp_size=1,
            transport=transport,
            fingerprint=fingerprint,
            on_progress=self.progress.set,
        )
        self.scheduler = SchedulerHalf(
            settings,
            engine_id=name,
            epoch=epoch,
            host="127.0.0.1",
            side_channel_port=self.worker.port,
            tp_size=1,
            block_size=BLOCK_SIZE,
            role=role,  # type: ignore[arg-type]
            on_progress=self.progress.set,
        )
        self.worker.register_kv_caches(self.memory.regions)
        self.sent: list[str] = []
        self.received: list[str] = []
        self.dropped: list[str] = []
        """Reports of the worker half that the scheduler half did not wait for."""
        self.failed: dict[str, str] = {}
        self.stats: dict[str, object] = {}

    def step(self) -> TransferResults:
        """One engine step without a forward."""
        meta = self.scheduler.build_connector_meta()
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        reported = self.worker.get_transfer_results()
        results = self.scheduler.update_connector_output(reported)
        self.dropped += reported.finished_sending - results.finished_sending
        self.dropped += reported.finished_recving - results.finished_recving
        self.worker.clear_connector_metadata()
        self.sent += results.finished_sending
        self.received += results.finished_recving
        self.failed.update(results.failed_recving)
        self.stats.update(results.stats)
        return results

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

    def begin_prefill(self, request_id: str, num_tokens: int, pair: Pair = FIRST) -> str:
        """The prompt is scheduled; its first step is done."""
        engine_request_id = f"{request_id}:{pair.gen}:{pair.attempt}"
        params = params_of(PullProducer(transfer_id=request_id, pair=pair))
        self.scheduler.on_new_request(engine_request_id, params, num_tokens)
        assert self.scheduler.get_num_new_matched_tokens(engine_request_id, num_tokens, 0) == (0, False)
        self.scheduler.update_state_after_alloc(engine_request_id, [], 0)
        self.step()
        return engine_request_id

    def prefill(
        self, request_id: str, block_ids: list[int], num_tokens: int, pair: Pair = FIRST
    ) -> tuple[str, dict[str, object]]:
        """A whole prefill; (engine request id, KV params for D)."""
        engine_request_id = self.begin_prefill(request_id, num_tokens, pair)
        delay, params = self.scheduler.request_finished(engine_request_id, block_ids, "prefilled")
        assert delay
        assert params is not None
        self.step()
        return engine_request_id, params

    def admit(self, name: str, params: dict[str, object], num_tokens: int) -> None:
        self.scheduler.on_new_request(name, params, num_tokens)

    def load(self, name: str, block_ids: list[int], num_tokens: int, num_computed: int = 0) -> int:
        """Allocates and starts the load; returns how many tokens come from P."""
        external, is_async = self.scheduler.get_num_new_matched_tokens(name, num_tokens, num_computed)
        assert external is not None
        assert is_async == (external > 0)
        self.scheduler.update_state_after_alloc(name, block_ids, external)
        self.step()
        return external

    # Push

    @property
    def source(self) -> KvSource:
        return KvSource(
            engine_id=self.name,
            epoch=self.epoch,
            host="127.0.0.1",
            port=self.worker.port,
            tp_size=1,
            block_size=BLOCK_SIZE,
        )

    def begin_push(self, request_id: str, num_tokens: int, pair: Pair = FIRST) -> str:
        """P's scheduler knows the request."""
        engine_request_id = f"{request_id}:{pair.gen}:{pair.attempt}"
        params = params_of(PushProducer(transfer_id=request_id, pair=pair))
        self.scheduler.on_new_request(engine_request_id, params, num_tokens)
        assert self.scheduler.get_num_new_matched_tokens(engine_request_id, num_tokens, 0) == (0, False)
        return engine_request_id

    def compute(
        self,
        engine_request_id: str,
        block_ids: list[int],
        num_tokens: int,
        written: list[bytes] | None = None,
        preempted: Sequence[str] = (),
    ) -> None:
        """One forward up to `num_tokens`; layer by layer its bytes come into being just before the layer's hook."""
        scheduled = [Scheduled(engine_request_id, block_ids, num_tokens)]
        meta = self.scheduler.build_connector_meta(scheduled, preempted)
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv()
        size = self.memory.layer_bytes
        for index, layer in enumerate(self.memory.layers):
            for block_id, data in zip(block_ids, written or [], strict=False):
                self.memory.fill_layer(block_id, index, data[index * size : (index + 1) * size])
            self.worker.save_kv_layer(layer)
        self.worker.wait_for_save()
        self.worker.clear_connector_metadata()

    def push(
        self, request_id: str, block_ids: list[int], num_tokens: int, *, chunk: int = 10**9, pair: Pair = FIRST
    ) -> tuple[str, list[bytes]]:
        """A whole prefill in chunks; (engine request id, the blocks' bytes)."""
        engine_request_id = self.begin_push(request_id, num_tokens, pair)
        rng = random.Random(request_id)
        written = [rng.randbytes(self.memory.block_bytes) for _ in block_ids]
        for end in range(min(chunk, num_tokens), num_tokens + chunk, chunk):
            self.compute(engine_request_id, block_ids, min(end, num_tokens), written)
        self.finish_push(engine_request_id, block_ids)
        return engine_request_id, written

    def finish_push(self, engine_request_id: str, block_ids: list[int], finish: str = "prefilled") -> None:
        assert self.scheduler.request_finished(engine_request_id, block_ids, finish) == (True, None)
        self.step()

    def receive(
        self,
        name: str,
        source: KvSource,
        request_id: str,
        block_ids: list[int],
        num_tokens: int,
        *,
        num_computed: int = 0,
        pair: Pair = FIRST,
    ) -> int:
        """Allocates and says where; returns how many tokens come from P."""
        params = params_of(PushConsumer(transfer_id=request_id, pair=pair, source=source))
        self.scheduler.on_new_request(name, params, num_tokens)
        return self.load(name, block_ids, num_tokens, num_computed)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


MakeWorld = Callable[..., World]


def close_all(worlds: list[World]) -> None:
    """At once: closing a Mooncake engine takes a second."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(World.close, worlds))
