"""Start-up checks name the setting to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.settings import ConnectorSettings
from connector.validate import problems, transport_problems

DEFAULTS = ConnectorSettings()


def test_the_defaults_have_no_problem():
    assert problems(DEFAULTS) == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"side_channel_host": "0.0.0.0"}, "side_channel_host"),
        ({"kv_answer_s": 5.0}, "kv_lease_s"),
        ({"kv_wait_s": 2.0}, "kv_wait_s"),
        ({"kv_max_descriptors": 4000}, "kv_max_descriptors"),
    ],
)
def test_a_setting_that_can_not_work_is_named(change, names):
    assert any(names in problem for problem in problems(replace(DEFAULTS, **change)))


@pytest.mark.parametrize("make", [lambda: MemoryTransport(MemoryFabric()), MooncakeTransport])
def test_a_transport_that_works_has_no_problem(make):
    assert transport_problems(make(), "127.0.0.1") == []
