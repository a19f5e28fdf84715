"""The proxy itself does what the network tests believe."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.faults.tcp_proxy import TcpProxy, Way

QUIET_S = 0.2
LIMIT_S = 10.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        yield listener


@pytest.fixture
def proxy(server: socket.socket) -> Iterator[TcpProxy]:
    with TcpProxy(server.getsockname()) as made:
        yield made


@pytest.fixture
def ends(server: socket.socket, proxy: TcpProxy) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(the client's, the server's) of one connection that has carried a byte each way."""
    with socket.create_connection((proxy.host, proxy.port), timeout=LIMIT_S) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(LIMIT_S)
            for here, there in ((client, accepted), (accepted, client)):
                here.sendall(b".")
                assert there.recv(1) == b"."
            yield client, accepted


def receives_nothing(end: socket.socket) -> bool:
    end.settimeout(QUIET_S)
    with contextlib.suppress(TimeoutError):
        end.recv(1)
        return False
    end.settimeout(LIMIT_S)
    return True


def test_what_is_held_comes_when_it_flows_again(proxy, ends):
    client, accepted = ends

    proxy.stall(Way.TO_SERVER)
    client.sendall(b"held")
    accepted.sendall(b"other way")

    assert client.recv(9) == b"other way"
    assert receives_nothing(accepted)
    proxy.heal()
    assert accepted.recv(9) == b"held"


def test_only_the_connections_of_one_process_are_held(proxy, ends):
    client, accepted = ends

    proxy.stall(pid=os.getppid())
    client.sendall(b"passes")
    assert accepted.recv(9) == b"passes"

    proxy.stall(pid=os.getpid())
    client.sendall(b"held")
    assert receives_nothing(accepted)


def test_both_ends_see_a_reset(proxy, ends):
    proxy.reset()

    for end in ends:
        with pytest.raises(ConnectionResetError):
            end.recv(1)


@pytest.mark.parametrize("gone", list(Way))
def test_of_a_half_open_connection_only_one_end_hears(proxy, ends, gone):
    client, accepted = ends
    lives, dies = (client, accepted) if gone is Way.TO_SERVER else (accepted, client)

    proxy.half_open(gone=gone)

    with pytest.raises(ConnectionResetError):
        dies.recv(1)
    for _ in range(20):
        lives.sendall(b"into the void" * 1000)
    assert receives_nothing(lives)


def test_slices_and_latency_change_no_byte(proxy, ends):
    client, accepted = ends
    proxy.slice_bytes, proxy.latency_s = 7, 0.0001
    sent = os.urandom(5000)

    threading.Thread(target=client.sendall, args=(sent,)).start()
    received = b""
    while len(received) < len(sent):
        received += accepted.recv(4096)

    assert received == sent


def test_an_end_of_stream_passes(ends):
    client, accepted = ends

    client.shutdown(socket.SHUT_WR)
    assert accepted.recv(1) == b""
    accepted.sendall(b"still open this way")
    assert client.recv(5) == b"still"
