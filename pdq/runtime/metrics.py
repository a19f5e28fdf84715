"""The Prometheus registry of a process and its own listener (gateways serve /metrics themselves)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from pdq.runtime.common import RuntimeSettings
from pdq.runtime.ports import FixedPort, check_port


def new_registry() -> CollectorRegistry:
    """Empty but for the process's own figures (CPU, memory, open files). One per process, handed to components."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def metrics_ports(settings: RuntimeSettings) -> list[FixedPort]:
    """To be checked before start-up; none where there is no listener."""
    if not settings.metrics_port:
        return []
    return [FixedPort(host=settings.metrics_host, port=settings.metrics_port, setting="--metrics-port")]


class MetricsListener:
    """Serves a registry over HTTP from a thread of its own. Port 0: no listener."""

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Raises PortTaken."""
        self._server = None
        if port:
            check_port(FixedPort(host=host, port=port, setting="--metrics-port"))
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None
