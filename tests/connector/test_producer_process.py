"""D against a P in another process, over Mooncake: right bytes, P stopped or killed while D reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from connector.mooncake import MooncakeTransport
from tests.connector.producer_process import BLOCK_BYTES, NUM_BLOCKS
from tests.connector.worlds import PATIENT, World

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

NUM_TOKENS = NUM_BLOCKS * 16
IDS = list(range(NUM_BLOCKS))


class HaltingTransport(MooncakeTransport):
    """Calls back after its first read, of many."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.after_first = threading.Event()
        self.go_on = threading.Event()

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        super().read(peer, local, remote, lengths)
        if not self.after_first.is_set():
            self.after_first.set()
            assert self.go_on.wait(60)


@pytest.fixture
def producer() -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.connector.producer_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("TICKET "):
            break
    yield process, json.loads(line.removeprefix("TICKET "))
    process.kill()
    process.communicate()


@pytest.fixture
def consumer() -> Iterator[tuple[World, HaltingTransport]]:
    transport = HaltingTransport(timeout_s=5)
    settings = replace(PATIENT, kv_batch_bytes=2 * BLOCK_BYTES)
    world = World("d", transport, role="consumer", settings=settings, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    yield world, transport
    transport.go_on.set()
    world.close()


def test_the_bytes_of_another_process_arrive(producer, consumer):
    (_, params), (d, transport) = producer, consumer
    transport.go_on.set()
    d.admit("d1", params, NUM_TOKENS)
    d.load("d1", IDS[::-1], NUM_TOKENS)

    d.until(lambda: bool(d.received), limit_s=60)

    assert not d.failed
    assert all(d.memory.block(block_id)[::4096] == bytes([NUM_BLOCKS - block_id]) * 1024 for block_id in IDS)


def test_a_p_killed_while_d_reads_fails_the_load_in_seconds_behind_a_fence(producer, consumer):
    (process, params), (d, transport) = producer, consumer
    d.admit("d1", params, NUM_TOKENS)
    d.load("d1", IDS, NUM_TOKENS)
    assert transport.after_first.wait(60)

    process.kill()
    process.wait()
    transport.go_on.set()
    d.until(lambda: bool(d.received), limit_s=60)

    assert "read failed" in d.failed["d1"]
    assert transport.generation >= 1


def test_a_p_stopped_while_d_reads_writes_nothing_after_the_report(producer, consumer):
    (process, params), (d, transport) = producer, consumer
    d.admit("d1", params, NUM_TOKENS)
    d.load("d1", IDS, NUM_TOKENS)
    assert transport.after_first.wait(60)

    os.kill(process.pid, signal.SIGSTOP)
    transport.go_on.set()
    d.until(lambda: bool(d.received), limit_s=60)
    for block_id in IDS:
        d.memory.fill(block_id, b"\xee" * BLOCK_BYTES)  # they belong to another request now
    os.kill(process.pid, signal.SIGCONT)
    threading.Event().wait(1.0)  # nothing to wait for: what must not come

    assert "d1" in d.failed
    assert all(d.memory.block(block_id) == b"\xee" * BLOCK_BYTES for block_id in IDS)
