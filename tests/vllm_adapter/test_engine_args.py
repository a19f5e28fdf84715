"""What the user's arguments decide, and what is left for pdq to say; with vLLM's parser in small."""

from __future__ import annotations

import argparse
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from engine.base import EngineError
from engine.vllm.launch import engine_args_of
from pdq.runtime.arguments import Arguments
from tests.vllm_adapter.test_processes import PLAN


class Parser(argparse.ArgumentParser):
    """Takes -O2 as vLLM's FlexibleArgumentParser does, and fails as it does for a dotted name without a value."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [
            "--optimization-level=" + word[2:].removeprefix("=") if word.startswith("-O") else word for word in args
        ]
        if words and words[-1].startswith("--") and "." in words[-1]:
            words[len(words)]
        return super().parse_args(words, namespace)


def _structured_outputs(text: str) -> SimpleNamespace:
    return SimpleNamespace(**({"backend": "auto"} | json.loads(text)))


class Args:
    """vLLM's AsyncEngineArgs."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-model-len", type=int, default=None)
        parser.add_argument("--kv-cache-memory-bytes", type=int, default=None)
        parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
        parser.add_argument("--kv-transfer-config", type=json.loads, default=None)
        parser.add_argument("--optimization-level", type=int, default=2)
        parser.add_argument("--compilation-config", "-cc", type=json.loads, default={})
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
        parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
        parser.add_argument("--distributed-executor-backend", default=None)
        parser.add_argument("--structured-outputs-config", type=_structured_outputs, default=_structured_outputs("{}"))
        for name in ("enforce-eager", "skip-tokenizer-init", "use-tqdm-on-load"):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=name == "use-tqdm-on-load")

    @staticmethod
    def from_cli_args(parsed: argparse.Namespace) -> SimpleNamespace:
        return SimpleNamespace(**vars(parsed))


def engine_args(text: str, *, is_cpu: bool = True) -> Any:
    plan = dataclasses.replace(PLAN, arguments=Arguments.from_text(text))
    return engine_args_of(plan, Args, Parser, is_cpu=is_cpu)


def test_the_model_is_known_before_vllm_looks_for_one():
    """Offline vLLM looks for the model's files while it makes its arguments: its own default's, if none is named."""
    seen: list[str] = []

    class Offline(Args):
        @classmethod
        def from_cli_args(cls, args: argparse.Namespace) -> Any:
            seen.append(args.model)
            return super().from_cli_args(args)

    engine_args_of(PLAN, Offline, Parser, is_cpu=True)

    assert seen == [PLAN.model_path]


def test_on_a_cpu_vllm_compiles_nothing_and_takes_pdqs_share_of_the_memory():
    made = engine_args("")

    assert (made.enforce_eager, made.kv_cache_memory_bytes, made.max_model_len) == (True, PLAN.cpu_kv_cache_bytes, -1)
    assert (made.skip_tokenizer_init, made.use_tqdm_on_load) == (True, False)


def test_only_an_engine_whose_tokens_are_seen_gets_a_tokenizer_if_the_model_has_one(tmp_path):
    def is_left_out(role: str) -> bool:
        plan = dataclasses.replace(PLAN, arguments=Arguments(()), model_path=str(tmp_path), role=role)
        left_out: bool = engine_args_of(plan, Args, Parser, is_cpu=True).skip_tokenizer_init
        return left_out

    assert is_left_out("consumer"), "the folder has none"

    (tmp_path / "tokenizer.json").touch()

    assert not is_left_out("consumer")
    assert is_left_out("producer")


def test_output_formats_are_the_gateways_librarys_unless_the_user_says_otherwise():
    assert engine_args("").structured_outputs_config.backend == "guidance"
    given = '--structured-outputs-config \'{"backend": "xgrammar"}\''
    assert engine_args(given).structured_outputs_config.backend == "xgrammar"
    given = "--structured-outputs-config '{\"enable_in_reasoning\": true}'"
    assert engine_args(given).structured_outputs_config.backend == "guidance"


def test_one_rank_on_a_cpu_computes_in_the_cores_process_unless_the_user_says_otherwise():
    assert engine_args("").distributed_executor_backend.endswith("UniProcExecutor")
    assert engine_args("--distributed-executor-backend mp").distributed_executor_backend == "mp"
    assert engine_args("-tp 2").distributed_executor_backend is None
    assert engine_args("-pp 2").distributed_executor_backend is None, "vLLM would refuse it with other words than ours"
    assert engine_args("", is_cpu=False).distributed_executor_backend is None


@pytest.mark.parametrize(
    "text",
    ["-O2", "-O=1", "-cc '{}'", "--compilation-config '{\"mode\": 3}'", "--optimization-level=1", "--no-enforce-eager"],
)
def test_what_is_said_of_compilation_stays_however_it_is_spelled(text):
    assert engine_args(text).enforce_eager is False


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--max-model-len 64", "max_model_len", 64),
        ("--gpu-memory-utilization 0.9", "kv_cache_memory_bytes", None),
        ("--kv-cache-memory-bytes=5", "kv_cache_memory_bytes", 5),
        ("--no-skip-tokenizer-init", "skip_tokenizer_init", False),
        ("--use-tqdm-on-load", "use_tqdm_on_load", True),
    ],
)
def test_a_given_value_stays_also_when_it_is_vllms_default(text, name, value):
    assert getattr(engine_args(text), name) == value


@pytest.mark.parametrize("text", ["--kv-transfer '{}'", "--max-model 64"])
def test_an_abbreviation_would_escape_the_checks_and_is_refused(text):
    with pytest.raises(EngineError, match=r"unrecognized arguments: --.*did you mean --"):
        engine_args(text)


def test_a_dotted_name_without_a_value_is_refused():
    with pytest.raises(EngineError, match=r"^--engine-args: the last argument has no value$"):
        engine_args("--compilation-config.mode")
