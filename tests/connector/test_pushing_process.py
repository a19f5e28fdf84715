"""D against a P in another process, over Mooncake: right bytes, P stopped or killed while it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.mooncake import MooncakeTransport
from pdq.wire.types import KvSource
from tests.connector.pushing_process import BLOCK_BYTES, NUM_BLOCKS, NUM_LAYERS, SETTINGS
from tests.connector.worlds import World

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

NUM_TOKENS = NUM_BLOCKS * 16
IDS = list(range(NUM_BLOCKS))
Start = Callable[[float], tuple["subprocess.Popen[str]", KvSource]]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(gbps: float) -> tuple[subprocess.Popen[str], KvSource]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.connector.pushing_process", str(gbps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        processes.append(process)
        return process, KvSource(**json.loads(line_with(process, "SOURCE ")))

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(params=[replace(SETTINGS, kv_answer_s=0.2, kv_answer_tries=25, kv_lease_s=6.0)])
def consumer(request: pytest.FixtureRequest) -> Iterator[tuple[World, MooncakeTransport]]:
    transport = MooncakeTransport(timeout_s=5)
    world = World(
        "d",
        transport,
        role="consumer",
        settings=request.param,
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
        num_layers=NUM_LAYERS,
    )
    yield world, transport
    world.close()


def line_with(process: subprocess.Popen[str], start: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start)
    raise AssertionError(f"the process ended before {start}")


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def until_some_bytes_came(d: World, block_id: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if d.memory.block(block_id)[0]:
            return
        d.progress.wait(0.005)
        d.step()
    raise AssertionError("nothing came")


@pytest.mark.parametrize("consumer", [SETTINGS], indirect=True)  # a busy machine is no reason to give up here
def test_the_bytes_of_another_process_arrive(start: Start, consumer):
    (process, source), (d, _) = start(0), consumer
    d.receive("d1", source, "r1", IDS[::-1], NUM_TOKENS)
    go(process)

    d.until(lambda: bool(d.received), limit_s=60)
    line_with(process, "SENT")

    assert not d.failed
    assert all(d.memory.block(block_id)[::4096] == bytes([NUM_BLOCKS - block_id]) * 1024 for block_id in IDS)
    assert d.stats["d1"].num_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_a_p_killed_while_it_writes_fails_the_receive_in_seconds_behind_a_fence(start: Start, consumer):
    (process, source), (d, transport) = start(0.3), consumer
    d.receive("d1", source, "r1", IDS, NUM_TOKENS)
    go(process)
    until_some_bytes_came(d, 0)

    process.kill()
    process.wait()
    d.until(lambda: bool(d.received), limit_s=60)

    assert "P has not answered" in d.failed["d1"]
    assert transport.generation == 1


def test_a_p_stopped_while_it_writes_writes_no_foreign_byte_when_it_wakes_up(start: Start, consumer):
    (process, source), (d, transport) = start(0.3), consumer
    d.receive("d1", source, "r1", IDS, NUM_TOKENS)
    go(process)
    until_some_bytes_came(d, 0)

    os.kill(process.pid, signal.SIGSTOP)
    d.until(lambda: bool(d.received), limit_s=60)
    assert transport.generation == 1
    for block_id in IDS:
        d.memory.fill(block_id, b"\xee" * BLOCK_BYTES)  # they belong to another request now
    os.kill(process.pid, signal.SIGCONT)
    line_with(process, "SENT")  # it has given up
    threading.Event().wait(0.5)  # nothing to wait for: what must not come

    assert "d1" in d.failed
    assert all(d.memory.block(block_id) == b"\xee" * BLOCK_BYTES for block_id in IDS)


def test_the_same_p_serves_again_after_it_was_stopped(start: Start, consumer):
    """The unthrottled writer is stopped in the middle of a call, D cancels, and P comes back."""
    (process, source), (d, _) = start(0), consumer
    d.receive("d1", source, "r1", IDS, NUM_TOKENS)
    go(process)
    until_some_bytes_came(d, 0)

    os.kill(process.pid, signal.SIGSTOP)
    d.scheduler.request_finished("d1", IDS, "aborted")
    d.until(lambda: bool(d.received), limit_s=60)
    for block_id in IDS:
        d.memory.fill(block_id, b"\xee" * BLOCK_BYTES)
    os.kill(process.pid, signal.SIGCONT)
    line_with(process, "SENT")

    assert not d.failed
    assert all(d.memory.block(block_id) == b"\xee" * BLOCK_BYTES for block_id in IDS)
