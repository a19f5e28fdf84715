from __future__ import annotations

import os
import socket

import pytest
from prometheus_client import Counter

from pdq.runtime import ports
from pdq.runtime.errors import PortTaken
from pdq.runtime.metrics import MetricsListener, new_registry
from pdq.runtime.ports import FixedPort, check_port, check_ports
from tests.servers import free_port


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
    port = free_port()

    check_port(FixedPort(host="127.0.0.1", port=port, setting="--http-port"))

    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_a_free_port_is_none_of_those_that_somebody_is_about_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_OWN", [free_port(), free_port()])
    first, second = ports._OWN

    assert {ports.free_port(besides=range(first, first + 1)) for _ in range(20)} == {second}


def test_a_port_that_two_settings_of_one_process_want_is_named_with_both() -> None:
    port = free_port()

    with pytest.raises(PortTaken, match=rf"port {port} on 127.0.0.1 \(--inbox-port\) is this process's --http-port"):
        check_ports(FixedPort(host="127.0.0.1", port=port, setting=name) for name in ("--http-port", "--inbox-port"))


def test_port_0_is_fine_on_an_address_of_this_machine_and_another_address_is_named() -> None:
    check_ports(FixedPort(host=host, port=0, setting="--http-port") for host in ("127.0.0.1", "127.0.0.1", "*", "[::]"))

    for port in (0, 1024):
        with pytest.raises(
            PortTaken, match=r"203\.0\.113\.1 is no address of this machine; choose another --inbox-host"
        ):
            check_port(FixedPort(host="203.0.113.1", port=port, setting="--inbox-port"))
    with pytest.raises(PortTaken, match=r"not-a-host\.invalid is no address of this machine"):
        check_port(FixedPort(host="not-a-host.invalid", port=0, setting="--inbox-port"))
    with pytest.raises(PortTaken, match="can't be used"):
        check_port(FixedPort(host="127.0.0.1", port=99999, setting="--inbox-port"))


def test_the_metrics_listener_serves_its_registry_and_port_0_means_none() -> None:
    registry = new_registry()
    Counter("jobs", "Jobs.", registry=registry).inc()
    port = free_port()
    listener = MetricsListener(registry, host="127.0.0.1", port=port)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
    finally:
        listener.close()
        listener.close()
    MetricsListener(registry, host="127.0.0.1", port=0).close()

    assert b"jobs_total 1.0" in answer
    assert b"process_cpu_seconds_total" in answer
