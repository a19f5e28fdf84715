"""An EngineRequest as the request of vLLM's engine core, checked by us and by vLLM's own input processor."""

from __future__ import annotations

import time
from typing import Any

from engine.base import EngineRequest
from engine.vllm.launch import Started
from engine.vllm.sampling import is_prefill, sampling_arguments
from pdq.wire.types import Capability, unpack_ids


class Refusal(Exception):
    """vLLM can't ever serve this request. The text is an `EngineOutput.error`."""

    def __init__(self, code: str, detail: object) -> None:
        super().__init__(f"{code}: {' '.join(str(detail).split())}")


def new_core_request(
    started: Started, request: EngineRequest, params: dict[str, Any] | None, *, has_connector: bool
) -> Any:
    """`params`: for the connector, which is told the request's id too. Raises Refusal."""
    if params is not None:
        if not has_connector:
            raise Refusal(
                "engine_error", "this engine was started without a connector: it can only prefill and decode by itself"
            )
        params["pdq_engine_request_id"] = request.engine_request_id
    token_ids = unpack_ids(request.prompt_ids) + unpack_ids(request.generated_ids)
    if token_ids and max(token_ids) >= started.vocab_size:
        raise Refusal("engine_error", f"token id {max(token_ids)} is outside the vocabulary of {started.vocab_size}")
    has_format = request.sampling.output_format is not None and not is_prefill(request.kv)
    if has_format and Capability.STRUCTURED_OUTPUTS not in started.capabilities:
        raise Refusal("unsupported", "this engine was started without a tokenizer, which output formats need")
    try:
        arguments = sampling_arguments(request, kv_params=params, eos_token_ids=started.eos_token_ids)
    except ValueError as error:
        raise Refusal("engine_error", error) from error
    try:
        core_request = _checked(started, request, token_ids, arguments)
    except Refusal:
        if has_format:  # is it to blame?
            _checked(started, request, token_ids, arguments | {"structured_outputs": None})
        raise
    # No random suffix: our ids are unique already.
    core_request.external_req_id = request.engine_request_id
    return core_request


def _checked(started: Started, request: EngineRequest, token_ids: list[int], arguments: dict[str, Any]) -> Any:
    """By vLLM. Raises Refusal; where there is an output format, it is taken to be at fault."""
    has_format = arguments.get("structured_outputs") is not None
    try:
        return started.llm.input_processor.process_inputs(
            request.engine_request_id,
            {"type": "token", "prompt_token_ids": token_ids},
            started.new_sampling_params(**arguments),
            supported_tasks=("generate",),
            arrival_time=time.time(),
        )
    except ImportError as error:  # vLLM looks for all of its libraries for output formats when it sees the first one
        raise Refusal("unsupported", error) from error
    except BaseException as error:  # vLLM's validation errors have no base of their own in all versions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # llguidance's
            raise
        raise Refusal("invalid_output_format" if has_format else "engine_error", error) from error
