"""The transport port: the same for the memory twin and for Mooncake."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from connector import mooncake
from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.transport import Transport, TransportError

SIZE = 4096


class Memory:
    def __init__(self, byte: int) -> None:
        self.buffer = ctypes.create_string_buffer(bytes([byte]) * SIZE, SIZE)
        self.address = ctypes.addressof(self.buffer)


@pytest.fixture(params=["memory", "mooncake"])
def new(request: pytest.FixtureRequest) -> Iterator[Callable[[], Transport]]:
    fabric = MemoryFabric()
    made: list[Transport] = []

    def make() -> Transport:
        made.append(MemoryTransport(fabric) if request.param == "memory" else MooncakeTransport())
        made[-1].start("127.0.0.1")
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def pair(new: Callable[[], Transport]) -> tuple[Transport, Memory, Transport, Memory]:
    here, there = new(), new()
    mine, theirs = Memory(1), Memory(2)
    here.register(mine.address, SIZE)
    there.register(theirs.address, SIZE)
    return here, mine, there, theirs


def test_a_read_brings_the_peers_bytes(pair):
    here, mine, there, theirs = pair

    here.read(there.address, [mine.address, mine.address + 8], [theirs.address, theirs.address + 100], [4, 2])

    assert mine.buffer.raw[:12] == b"\2\2\2\2\1\1\1\1\2\2\1\1"


def test_a_write_puts_bytes_into_the_peers_memory(pair):
    here, mine, there, theirs = pair

    here.write(there.address, [mine.address], [theirs.address + 4], [4])

    assert theirs.buffer.raw[:12] == b"\2\2\2\2\1\1\1\1\2\2\2\2"


def test_memory_that_is_not_registered_is_not_read(pair):
    here, mine, there, theirs = pair

    with pytest.raises(TransportError):
        here.read(there.address, [mine.address], [theirs.address + SIZE - 8], [16])


def test_nobody_at_the_address_is_an_error_and_a_failed_probe(pair):
    here, mine, there, theirs = pair
    address = there.address
    assert here.probe(address)
    there.close()

    assert not here.probe(address)
    with pytest.raises(TransportError):
        here.read(address, [mine.address], [theirs.address], [16])


def test_overlapping_memory_is_refused(pair):
    here, mine, _, _ = pair

    with pytest.raises(TransportError, match="overlaps"):
        here.register(mine.address + 8, 8)


def test_after_a_fence_reads_go_on_and_peers_find_the_new_address(pair):
    here, mine, there, theirs = pair
    before = (here.address, there.address)

    here.fence()
    there.fence()
    here.read(there.address, [mine.address], [theirs.address], [SIZE])

    assert (here.address, there.address) != before
    assert (here.generation, there.generation) == (1, 1)
    assert mine.buffer.raw == theirs.buffer.raw


def test_closing_twice_is_harmless(new):
    transport = new()
    transport.close()
    transport.close()


def test_the_old_framing_of_mooncake_is_refused(monkeypatch):
    monkeypatch.setenv("MC_TCP_PROTO", "1")

    with pytest.raises(TransportError, match="unset MC_TCP_PROTO"):
        MooncakeTransport()


def test_more_descriptors_than_mooncake_takes_are_refused():
    transport = MooncakeTransport()

    with pytest.raises(TransportError, match="513 descriptors"):
        transport.read("127.0.0.1:1", [1] * 513, [1] * 513, [1] * 513)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("libibverbs.so.1: cannot open shared object file", "apt-get install libibverbs1"),
        ("libcurl.so.4: cannot open shared object file", "apt-get install libcurl4"),
        ("libodd.so.7: cannot open shared object file", "libodd.so.7"),
        ("No module named 'mooncake'", "pip install"),
    ],
)
def test_a_missing_library_is_named_with_its_debian_package(error, hint):
    assert hint in mooncake.explain_import_error(error)


def test_no_port_of_a_fenced_mooncake_engine_is_listened_on_again():
    environ = {**os.environ, "MC_MIN_RPC_PORT": "16500", "MC_MAX_RPC_PORT": "16700"}  # chance would soon repeat one

    ended = subprocess.run(
        [sys.executable, "-m", "tests.connector.fencing_process"], env=environ, capture_output=True, timeout=100
    )

    assert ended.returncode == 0, ended.stderr.decode()
