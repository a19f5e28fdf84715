"""The plugin, loaded over either generation of vLLM's hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType

import pytest
import structlog

from tests.connector_plugin.fake_vllm import fake_vllm


@pytest.fixture(autouse=True, scope="package")
def _quiet_logs() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["current", "former"])
def plugin(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with fake_vllm(request.param) as module:
        yield module


@pytest.fixture
def current_plugin() -> Iterator[ModuleType]:
    with fake_vllm("current") as module:
        yield module
