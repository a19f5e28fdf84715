"""The plugin fits every vLLM whose names are recorded; a version that changes a hook is told apart in plain words."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest

from connector.vllm_plugin.hooks import CURRENT, FORMER, generation_of, misfits, unknown_hooks
from tests.connector_plugin.fake_vllm import FormerBase, fake_vllm
from tests.connector_plugin.record_hooks import recorded

RECORDED = recorded()


@pytest.mark.parametrize("version", RECORDED)
def test_a_recorded_version_has_the_hooks_that_the_plugin_relies_on(version: str) -> None:
    facts = RECORDED[version]

    assert misfits(facts["classes"], version) == []
    assert unknown_hooks(facts["classes"], [name for calls in facts["calls"].values() for name in calls]) == []


@pytest.mark.parametrize("version", RECORDED)
def test_a_step_calls_the_worker_hooks_in_the_order_that_the_plugin_relies_on(version: str) -> None:
    """Loads and sends are told at the first, reports are taken before what goes along with them."""
    step, reports = RECORDED[version]["calls"]["step"], ("get_transfer_results", "get_finished")

    assert step[0] == "bind_connector_metadata"
    assert step[-1] == "clear_connector_metadata"
    taken = next(index for index, name in enumerate(step) if name in reports)
    later = ("get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta")
    assert all(taken < step.index(name) for name in later)


def test_old_and_new_versions_are_told_apart() -> None:
    generations = {version: generation_of(facts["classes"]) for version, facts in RECORDED.items()}

    assert generations == {"0.23.0": FORMER, "0.26.0": FORMER, "0.32.0": CURRENT, "0.33.0": CURRENT}


def changed(version: str = "0.32.0") -> dict[str, Any]:
    classes: dict[str, Any] = copy.deepcopy(RECORDED[version]["classes"])
    return classes


def test_another_parameter_is_reported_with_both_signatures() -> None:
    facts = changed()
    facts["KVConnectorBase_V1"]["save_kv_layer"] = ["layer_name", "kv_layer", "**kwargs"]

    assert misfits(facts, "9.9") == [
        "vLLM 9.9: KVConnectorBase_V1.save_kv_layer takes (layer_name, kv_layer, **kwargs),"
        " the plugin expects (layer_name, kv_layer, attn_metadata, **kwargs)"
    ]


def test_a_hook_a_field_or_a_class_that_is_gone_is_reported_by_name() -> None:
    facts = changed()
    del facts["KVConnectorBase_V1"]["on_new_request"]
    facts["CachedRequestData"]["fields"].remove("new_block_ids")
    del facts["KVConnectorStats"]

    assert misfits(facts, "9.9") == [
        "vLLM 9.9: KVConnectorBase_V1 has no on_new_request(request)",
        "vLLM 9.9 has no class KVConnectorStats",
        "vLLM 9.9: CachedRequestData has no field new_block_ids",
    ]


def test_a_hook_that_is_new_to_the_plugin_is_reported() -> None:
    assert unknown_hooks(changed(), ["shutdown", "teleport_kv", "reset_cache"]) == ["teleport_kv"]


def test_the_plugin_refuses_to_load_over_other_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FormerBase, "on_new_request")

    with (
        pytest.raises(ImportError, match=r"KVConnectorBase_V1 has no on_new_request\(request\)"),
        fake_vllm("current"),
    ):
        pass


def test_both_connectors_are_registered_once_however_often_vllm_asks(plugin: ModuleType) -> None:
    import vllm.distributed.kv_transfer.kv_connector.factory as factory

    plugin.register()
    plugin.register()

    assert factory.KVConnectorFactory._registry == {
        name: ("connector.plugin", name) for name in ("PdqMooncakeConnector", "PdqMooncakeLayerwiseConnector")
    }


def test_the_classes_answer_without_an_instance(plugin: ModuleType) -> None:
    from tests.connector_plugin.configs import vllm_config

    pull, push = plugin.PdqMooncakeConnector, plugin.PdqMooncakeLayerwiseConnector
    layout = {"0.32": "LBHNC", "0.23": "HND"}[plugin.GENERATION.name]

    assert pull.get_required_kvcache_layout(vllm_config()) == layout
    assert push.get_required_kvcache_layout(vllm_config(use_mla=True)) is None
    assert (pull.requires_piecewise_for_cudagraph({}), push.requires_piecewise_for_cudagraph({})) == (False, True)
    assert pull.supports_sleep_mode(None) is False
