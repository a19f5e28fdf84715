"""Start-up checks name the setting to change."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.settings import ConnectorSettings
from connector.validate import fingerprint_problems, problems, transport_problems

DEFAULTS = ConnectorSettings()


def test_the_defaults_have_no_problem():
    assert problems(DEFAULTS, num_ranks=2) == []


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
    assert any(names in problem for problem in problems(replace(DEFAULTS, **change), num_ranks=1))


def test_a_taken_port_of_any_rank_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]

        found = problems(replace(DEFAULTS, side_channel_port=port - 1), num_ranks=2)

    assert any(f"port {port} (side_channel_port + rank)" in problem for problem in found)


@pytest.mark.parametrize("make", [lambda: MemoryTransport(MemoryFabric()), MooncakeTransport])
def test_a_transport_that_works_has_no_problem(make):
    assert transport_problems(make(), "127.0.0.1") == []


def test_fingerprints_are_compared_field_by_field():
    own = "model=a dtype=float32 layers=4"

    assert fingerprint_problems(own, {"p1": own, "p2": "model=a dtype=float16 layers=4"}) == [
        "worker p2 does not fit: dtype: float32 here, float16 at the peer"
    ]
