"""How fast KV moves: a pull through both connector halves against one raw Mooncake call of as many bytes.

    python -m benchmarks.kv_rate [--rounds 5] [--mib 64 256] [--block-kib 256]

P and D are two processes, as in a deployment: scheduler half, worker half, side channel, Mooncake over loopback TCP.
Per round, in one run: one raw write, one raw read (one descriptor each, Mooncake's own blocking calls), then pulls of
the same bytes with blocks side by side and with no two blocks side by side. A pull's time starts when D has allocated
the blocks and ends when D's engine may use them. All bytes are compared after each pull. Ratios are per round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import secrets
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import structlog

from connector.layout import KvRegion
from connector.mooncake import MooncakeTransport
from connector.params import PullProducer, params_of
from connector.scheduler_half import SchedulerHalf
from connector.settings import ConnectorSettings
from connector.step import TransferResults
from connector.worker_half import WorkerHalf
from pdq.wire.types import Pair

HOST = "127.0.0.1"
BLOCK_SIZE = 16
PAIR = Pair(gen=1, attempt=1)
MIB = 2**20


class Side:
    """One engine's memory and both halves; `step` is an engine step without a forward."""

    def __init__(self, name: str, role: str, num_blocks: int, block_bytes: int) -> None:
        settings = ConnectorSettings()
        epoch = secrets.token_hex(4)
        self.memory = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        self.news = threading.Event()
        self._worker = WorkerHalf(
            settings,
            engine_id=name,
            epoch=epoch,
            host=HOST,
            side_channel_port=0,
            rank=0,
            tp_size=1,
            transport=MooncakeTransport(),
            fingerprint="bench=1",
            on_progress=self.news.set,
        )
        region = KvRegion(
            layer="all",
            base_address=self.memory.ctypes.data,
            block_stride_bytes=block_bytes,
            num_blocks=num_blocks,
        )
        self._worker.register_kv_caches([region])
        self.scheduler = SchedulerHalf(
            settings,
            engine_id=name,
            epoch=epoch,
            host=HOST,
            side_channel_port=self._worker.port,
            tp_size=1,
            block_size=BLOCK_SIZE,
            role=role,  # type: ignore[arg-type]
        )

    def step(self) -> TransferResults:
        meta = self.scheduler.build_connector_meta()
        self._worker.handle_preemptions(meta)
        self._worker.bind_connector_metadata(meta)
        self._worker.start_load_kv()
        results = self.scheduler.update_connector_output(self._worker.get_transfer_results())
        self._worker.clear_connector_metadata()
        return results

    def close(self) -> None:
        self.scheduler.shutdown()
        self._worker.shutdown()


class Raw:
    """A Transfer Engine of its own, used as Mooncake's examples do."""

    def __init__(self, memory: np.ndarray) -> None:
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        assert self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
        self.address = f"{HOST}:{self._engine.get_rpc_port()}"
        self._memory = memory

    def time(self, method: str, peer: str, remote: int, num_bytes: int) -> float:
        call = getattr(self._engine, method)
        began = time.perf_counter()
        status = call(peer, self._memory.ctypes.data, remote, num_bytes)
        seconds = time.perf_counter() - began
        assert status == 0, (method, status)
        return seconds


def serve(pipe: multiprocessing.connection.Connection, num_blocks: int, block_bytes: int) -> None:
    """P: answers (name, blocks, seed) with KV params once these blocks hold random bytes; None ends it."""
    be_quiet()
    side = Side("p", "producer", num_blocks, block_bytes)
    scratch = np.zeros(num_blocks * block_bytes, dtype=np.uint8)
    raw = Raw(scratch)
    pipe.send((raw.address, scratch.ctypes.data))
    while (order := pipe.recv()) is not None:
        name, blocks, seed = order
        side.step()
        side.memory[blocks] = content(len(blocks), block_bytes, seed)
        side.scheduler.on_new_request(name, params_of(PullProducer(transfer_id=name, pair=PAIR)), len(blocks) * 16)
        side.scheduler.update_state_after_alloc(name, blocks, 0)
        _, params = side.scheduler.request_finished(name, blocks, "prefilled")
        side.step()
        pipe.send(params)
    side.close()


def content(num_blocks: int, block_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


class Pulls:
    """D, and its way to tell P what to prefill."""

    def __init__(self, pipe: multiprocessing.connection.Connection, num_blocks: int, block_bytes: int) -> None:
        self._pipe = pipe
        self._block_bytes = block_bytes
        self._side = Side("d", "consumer", num_blocks, block_bytes)
        self._count = 0

    def time(self, theirs: list[int], ours: list[int]) -> tuple[float, int]:
        """(seconds, descriptors) of one pull; the bytes are compared."""
        self._count += 1
        name = f"r{self._count}"
        num_tokens = len(theirs) * BLOCK_SIZE
        self._pipe.send((name, theirs, self._count))
        side, params = self._side, self._pipe.recv()
        side.scheduler.on_new_request(name, params, num_tokens)
        num_external, _ = side.scheduler.get_num_new_matched_tokens(name, num_tokens, 0)
        side.news.clear()
        began = time.perf_counter()
        side.scheduler.update_state_after_alloc(name, ours, num_external or 0)
        results = side.step()
        while name not in results.finished_recving:
            assert side.news.wait(60), "no end of the pull"
            side.news.clear()
            results = side.step()
        seconds = time.perf_counter() - began
        assert not results.failed_recving, results.failed_recving
        assert np.array_equal(side.memory[ours], content(len(ours), self._block_bytes, self._count)), "wrong bytes"
        return seconds, results.stats[name].num_descriptors

    def close(self) -> None:
        self._side.close()


def measure(num_mib: int, block_kib: int, rounds: int) -> None:
    block_bytes, num_bytes = block_kib * 1024, num_mib * MIB
    wanted = num_bytes // block_bytes
    num_blocks = 2 * wanted
    side_by_side, apart = list(range(wanted)), list(range(0, num_blocks, 2))
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, num_blocks, block_bytes))
    process.start()
    peer, remote = pipe.recv()
    pulls = Pulls(pipe, num_blocks, block_bytes)  # first: it tells Mooncake how much to log
    raw = Raw(np.zeros(num_bytes, dtype=np.uint8))
    jobs: dict[str, Callable[[], tuple[float, int]]] = {
        "raw write": lambda: (raw.time("transfer_sync_write", peer, remote, num_bytes), 1),
        "raw read": lambda: (raw.time("transfer_sync_read", peer, remote, num_bytes), 1),
        "pull, blocks side by side": lambda: pulls.time(side_by_side, side_by_side),
        "pull, blocks apart": lambda: pulls.time(apart, apart),
    }
    rates: dict[str, list[float]] = {name: [] for name in jobs}
    descriptors: dict[str, int] = {}
    for number in range(-1, rounds):  # the first round touches all memory and opens all connections
        for name, job in jobs.items():
            seconds, descriptors[name] = job()
            if number >= 0:
                rates[name].append(num_bytes / seconds / 1e9)
    print(f"\n{num_mib} MiB in blocks of {block_kib} KiB, {rounds} rounds, median (lowest-highest)\n")
    print("| what | descriptors | GB/s | of the raw write | of the raw read |\n|---|---|---|---|---|")
    for name, values in rates.items():
        ratios = [
            spread([value / base for value, base in zip(values, rates[reference], strict=True)])
            for reference in ("raw write", "raw read")
        ]
        print(f"| {name} | {descriptors[name]} | {spread(values)} | {ratios[0]} | {ratios[1]} |", flush=True)
    pulls.close()
    pipe.send(None)
    process.join(20)


def be_quiet() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--block-kib", type=int, default=256)
    arguments = parser.parse_args()
    be_quiet()
    for num_mib in arguments.mib:
        measure(num_mib, arguments.block_kib, arguments.rounds)


if __name__ == "__main__":
    main()
