"""Which connector class vLLM is told to load."""

from __future__ import annotations

import pytest

from connector.settings import ConnectorSettings
from engine.vllm.create import kv_transfer
from engine.vllm.settings import VllmSettings


@pytest.mark.parametrize(
    ("connector", "mode", "path", "name"),
    [
        ("", "pull", "connector.plugin", "PdqMooncakeConnector"),
        ("", "push", "connector.plugin", "PdqMooncakeLayerwiseConnector"),
        ("mine.of_them:Derived", "pull", "mine.of_them", "Derived"),
    ],
)
def test_it_is_the_one_of_the_mode_or_the_one_that_is_named(connector, mode, path, name):
    settings = VllmSettings(vllm_connector=connector)

    made = kv_transfer(settings, ConnectorSettings(), mode=mode, role="producer", engine_id="w1", epoch="e1")

    assert (made["kv_connector_module_path"], made["kv_connector"]) == (path, name)


@pytest.mark.parametrize("connector", ["Derived", "mine.of_them:", ":Derived", "mine:of them"])
def test_a_name_of_another_form_is_refused(connector):
    with pytest.raises(ValueError, match="expected MODULE:CLASS"):
        VllmSettings(vllm_connector=connector)
