"""Start-up checks name the setting to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.settings import ConnectorSettings
from connector.validate import installation_problems, problems, transport_problems

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


def test_two_mooncake_packages_are_named_with_the_way_out():
    installed = {"mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"}

    (problem,) = installation_problems(installed.__contains__)

    assert all(name in problem for name in installed)
    assert "pip uninstall -y mooncake-transfer-engine mooncake-transfer-engine-non-cuda" in problem


def test_one_mooncake_package_or_none_is_no_problem():
    assert installation_problems({"mooncake-transfer-engine-npu"}.__contains__) == []
    assert installation_problems(lambda _: False) == []
    assert installation_problems() == []
