from __future__ import annotations

import os
import socket

import pytest
from prometheus_client import Counter

from pdq.runtime.errors import PortTaken
from pdq.runtime.metrics import MetricsListener, new_registry
from pdq.runtime.ports import FixedPort, check_port, check_ports


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def test_a_taken_port_is_named_with_its_setting_and_its_holder() -> None:
    with listening() as server:
        port = server.getsockname()[1]

        with pytest.raises(PortTaken) as caught:
            check_ports([FixedPort(host="127.0.0.1", port=port, setting="--http-port")])

    assert f"port {port} on 127.0.0.1 (--http-port) is taken by" in str(caught.value)
    assert f"(pid {os.getpid()})" in str(caught.value)


def test_a_free_port_can_still_be_bound_after_the_check() -> None:
    with listening() as server:
        port = server.getsockname()[1]

    check_port(FixedPort(host="127.0.0.1", port=port, setting="--http-port"))

    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_port_0_is_always_fine_and_an_impossible_address_is_named() -> None:
    check_port(FixedPort(host="not an address", port=0, setting="--http-port"))

    with pytest.raises(PortTaken, match=r"port 1024 on 203.0.113.1 \(--inbox-port\) can't be used"):
        check_port(FixedPort(host="203.0.113.1", port=1024, setting="--inbox-port"))
    with pytest.raises(PortTaken, match="can't be used"):
        check_port(FixedPort(host="127.0.0.1", port=99999, setting="--inbox-port"))


def test_the_metrics_listener_serves_its_registry_and_port_0_means_none() -> None:
    registry = new_registry()
    Counter("jobs", "Jobs.", registry=registry).inc()
    with listening() as server:
        port = server.getsockname()[1]
    listener = MetricsListener(registry, host="127.0.0.1", port=port)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
    finally:
        listener.close()
        listener.close()
    MetricsListener(registry, host="127.0.0.1", port=0).close()

    assert b"jobs_total 1.0" in answer
    assert b"process_cpu_seconds_total" in answer
