"""Engines over both transports; quiet logs, since random sequences would write thousands of lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.transport import Transport
from tests.connector.worlds import MakeWorld, World, close_all


@pytest.fixture(autouse=True, scope="package")
def _quiet_logs() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["memory", "mooncake"])
def world(request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    fabric = MemoryFabric()
    worlds: list[World] = []

    def make(name: str, **options: object) -> World:
        transport: Transport = MemoryTransport(fabric) if request.param == "memory" else MooncakeTransport()
        worlds.append(World(name, transport, **options))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    close_all(worlds)
