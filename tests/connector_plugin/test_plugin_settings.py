"""A vLLM configuration says what the connector needs, with a default for all that a plain `vllm serve` leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from connector.vllm_plugin.settings import plugin_settings
from tests.connector_plugin.configs import kv_cache_config, vllm_config


def test_only_the_connectors_name_and_role_have_to_be_given() -> None:
    settings = plugin_settings(vllm_config(role="kv_producer"), kv_cache_config(), host="10.0.0.7")

    assert (settings.connector.side_channel_host, settings.connector.side_channel_port) == ("10.0.0.7", 14579)
    assert (settings.role, settings.engine_id, settings.epoch) == ("producer", "engine-1", "engine-1-abcde")
    assert (settings.block_size, settings.num_blocks, settings.layers) == (4, 32, ("l0", "l1"))
    assert (settings.tp_size, settings.num_kv_heads, settings.group) == (1, 4, 0)


def test_what_is_given_beats_the_defaults() -> None:
    extra = {
        "pdq_epoch": "e7",
        "pdq_side_channel_host": "10.0.0.9",
        "pdq_side_channel_port": 7000,
        "pdq_connector": {"kv_lease_s": 20, "side_channel_host": "10.0.0.8", "side_channel_port": 6000},
        "someone_elses": 1,
    }

    settings = plugin_settings(vllm_config(extra=extra), kv_cache_config(), host="10.0.0.7")

    assert settings.epoch == "e7"
    assert settings.connector.kv_lease_s == 20.0
    assert (settings.connector.side_channel_host, settings.connector.side_channel_port) == ("10.0.0.9", 7000)


def test_settings_of_the_connector_may_name_host_and_port_too() -> None:
    extra = {"pdq_connector": {"side_channel_host": "10.0.0.8", "side_channel_port": 6000}}

    settings = plugin_settings(vllm_config(extra=extra), kv_cache_config(), host="10.0.0.7")

    assert (settings.connector.side_channel_host, settings.connector.side_channel_port) == ("10.0.0.8", 6000)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"device": "cuda"}, "device 'cuda'"),
        ({"tp_size": 3}, "4 KV heads"),
        ({"port": 65535, "tp_size": 2}, "65535 to 65536"),
        ({"extra": {"pdq_prot": 1}}, "unknown key 'pdq_prot'"),
        ({"extra": {"pdq_epoch": 5}}, "pdq_epoch: expected a text"),
        ({"extra": {"pdq_side_channel_port": "7000"}}, "pdq_side_channel_port: expected int"),
        ({"extra": {"pdq_connector": {"kv_leas_s": 1}}}, "unknown setting 'kv_leas_s'"),
        ({"extra": {"pdq_connector": {"kv_lease_s": "10"}}}, "kv_lease_s: expected float"),
        ({"extra": {"pdq_connector": {"kv_lease_s": 1.0}}}, "must be below"),
        ({"extra": {"pdq_connector": 5}}, "expected a table"),
        ({"extra": {"pdq_side_channel_host": "0.0.0.0"}}, "no peer can connect"),
    ],
)
def test_what_can_not_work_is_refused_with_what_to_change(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        plugin_settings(vllm_config(**config), kv_cache_config(), host="127.0.0.1")


def test_several_kv_cache_groups_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"2 KV cache groups \(FullAttentionSpec, FullAttentionSpec\)"):
        plugin_settings(vllm_config(), kv_cache_config(num_groups=2), host="127.0.0.1")


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="cuda") as caught:
        plugin_settings(vllm_config(device="cuda", pipeline_parallel_size=2), kv_cache_config(), host="127.0.0.1")

    assert "pipeline_parallel_size" in str(caught.value)
