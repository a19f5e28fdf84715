"""An engine's memory and both halves, driven in the engine's order: what the tests stand on."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from connector.layout import KvRegion
from connector.params import PullProducer, params_of
from connector.scheduler_half import SchedulerHalf
from connector.settings import ConnectorSettings
from connector.step import TransferResults
from connector.transport import Transport
from connector.worker_half import WorkerHalf
from pdq.wire.types import Pair

FINGERPRINT = "model=tiny dtype=float32 block_size=16"
BLOCK_SIZE = 16
FIRST = Pair(gen=1, attempt=1)
QUICK = ConnectorSettings(kv_lease_s=2.0, kv_hold_s=2.5, kv_wait_s=5.0, kv_answer_s=0.1, kv_answer_tries=5)


class Memory:
    """Block-major KV memory: one region holds all layers of a block."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._buffer = ctypes.create_string_buffer(num_blocks * block_bytes)
        self.view = memoryview(self._buffer).cast("B")

    @property
    def regions(self) -> list[KvRegion]:
        return [
            KvRegion(
                layer="all",
                base_address=ctypes.addressof(self._buffer),
                block_stride_bytes=self.block_bytes,
                num_blocks=self.num_blocks,
            )
        ]

    def fill(self, block_id: int, data: bytes) -> None:
        self.view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes] = data

    def block(self, block_id: int) -> bytes:
        return bytes(self.view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes])

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
        settings: ConnectorSettings = QUICK,
        num_blocks: int = 64,
        block_bytes: int = 1024,
        fingerprint: str = FINGERPRINT,
        epoch: str | None = None,
        port: int = 0,
    ) -> None:
        self.memory = Memory(num_blocks, block_bytes)
        self.progress = threading.Event()
        epoch = epoch or f"{name}-{random.randrange(2**32):08x}"
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
        self.failed: dict[str, str] = {}
        self.stats: dict[str, object] = {}

    def step(self) -> TransferResults:
        """One engine step without a forward."""
        meta = self.scheduler.build_connector_meta()
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv()
        self.worker.wait_for_save()
        results = self.scheduler.update_connector_output(self.worker.get_transfer_results())
        self.worker.clear_connector_metadata()
        self.sent += results.finished_sending
        self.received += results.finished_recving
        self.failed.update(results.failed_recving)
        self.stats.update(results.stats)
        return results

    def until(self, condition: Callable[[], bool], limit_s: float = 10.0) -> None:
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

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


MakeWorld = Callable[..., World]


def close_all(worlds: list[World]) -> None:
    """At once: closing a Mooncake engine takes a second."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(World.close, worlds))
