"""A request body becomes an `Ask`, or a GatewayError that names the field at fault. Nothing else is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import GatewayError
from gateway.openai_schema import REFUSED, ChatMessage, ChatRequest, Common, CompletionRequest
from gateway.output_format import field_of, read_output_format
from pdq.wire.types import SamplingParams

MAX_STOPS: Final = 16
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NESTED: Final = frozenset({"stream_options"})
_R = TypeVar("_R", bound=Common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants, types and ranges checked; tokens are not counted yet."""

    kind: Literal["chat", "text"]
    model: str
    messages: tuple[dict[str, str], ...]
    prompts: tuple[str | list[int], ...]
    """One answer choice each; empty for a chat."""
    is_list: bool
    max_tokens: int | None
    """None: what is left of the context. 0 only with echo: score the prompt, generate nothing."""
    max_tokens_field: str
    sampling: SamplingParams
    """Its max_tokens is decided when the prompt's tokens are counted."""
    format_field: str
    """The request field that its output format came from."""
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    add_generation_prompt: bool
    template_kwargs: dict[str, Any]
    stream: bool
    include_usage: bool
    logprobs: bool
    """Report logprobs of the generated tokens."""
    prompt_logprobs: bool
    """Report them as vLLM's field of that name (not for echo)."""
    echo: bool
    return_token_ids: bool
    priority: int
    timeout_s: float | None


def parse_chat(body: bytes) -> Ask:
    """Raises GatewayError."""
    request = _validated(ChatRequest, body)
    if request.logprobs is not True and request.top_logprobs:
        raise GatewayError("invalid_value", "top_logprobs needs logprobs: true", param="top_logprobs")
    if (request.model_extra or {}).get("echo"):
        raise GatewayError("unsupported", "echo is not supported for chats", param="echo")
    limit, field = request.max_tokens, "max_tokens"
    if request.max_completion_tokens is not None:
        limit, field = request.max_completion_tokens, "max_completion_tokens"
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _ask(
        request,
        kind="chat",
        messages=tuple(_message(index, message) for index, message in enumerate(request.messages)),
        max_tokens=limit,
        max_tokens_field=field,
        logprobs=logprobs,
        add_generation_prompt=request.add_generation_prompt is not False,
        template_kwargs=request.chat_template_kwargs or {},
    )


def parse_completion(body: bytes, *, max_prompts: int) -> Ask:
    """Raises GatewayError."""
    request = _validated(CompletionRequest, body)
    prompts, is_list = _prompts(request.prompt)
    if not prompts:
        raise GatewayError("invalid_value", "prompt is an empty list", param="prompt")
    if len(prompts) > max_prompts:
        raise GatewayError(
            "invalid_value", f"prompt lists {len(prompts)} prompts, at most {max_prompts}", param="prompt"
        )
    return _ask(
        request,
        kind="text",
        prompts=prompts,
        is_list=is_list,
        max_tokens=request.max_tokens,
        max_tokens_field="max_tokens",
        logprobs=request.logprobs,
        echo=bool(request.echo),
    )


def _ask(
    request: Common,
    *,
    kind: Literal["chat", "text"],
    max_tokens: int | None,
    max_tokens_field: str,
    logprobs: int | None,
    messages: tuple[dict[str, str], ...] = (),
    prompts: tuple[str | list[int], ...] = (),
    is_list: bool = False,
    echo: bool = False,
    add_generation_prompt: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> Ask:
    if max_tokens is not None and max_tokens < (0 if echo else 1):
        raise GatewayError("invalid_value", f"{max_tokens_field} is {max_tokens}, at least 1", param=max_tokens_field)
    if request.prompt_logprobs is not None and request.stream:
        raise GatewayError("unsupported", "prompt_logprobs is not supported with stream", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise GatewayError("invalid_value", "stream_options needs stream: true", param="stream_options")
    options = request.stream_options
    prompt_logprobs = request.prompt_logprobs
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return Ask(
        kind=kind,
        model=request.model,
        messages=messages,
        prompts=prompts,
        is_list=is_list,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        sampling=_sampling(request, logprobs, prompt_logprobs),
        format_field=field_of(request.response_format),
        stops=_stops(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        add_special_tokens=request.add_special_tokens is not False,
        add_generation_prompt=add_generation_prompt,
        template_kwargs=template_kwargs or {},
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        logprobs=logprobs is not None,
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=echo,
        return_token_ids=bool(request.return_token_ids),
        priority=request.priority or 0,
        timeout_s=request.request_timeout_s,
    )


def _sampling(request: Common, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    top_k = request.top_k
    return SamplingParams(
        max_tokens=1,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        output_format=read_output_format(request.response_format, request.structured_outputs),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise GatewayError("invalid_value", f"stop lists {len(stops)} strings, at most {MAX_STOPS}", param="stop")
    if "" in stops:
        raise GatewayError("invalid_value", "stop contains an empty string", param="stop")
    return stops


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[tuple[str | list[int], ...], bool]:
    if isinstance(prompt, str):
        return (prompt,), False
    if prompt and isinstance(prompt[0], int):
        return (prompt,), False  # if one is an int, all are
    return tuple(prompt), True  # type: ignore[arg-type]


def _message(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise GatewayError("unsupported", "tool calls are not supported", param=where)
    role = _ROLES.get(message.role)
    if role is None:
        allowed = ", ".join(_ROLES)
        raise GatewayError("invalid_value", f"role {message.role!r} is not one of {allowed}", param=f"{where}.role")
    return {"role": role, "content": _content(where, message)}


def _content(where: str, message: ChatMessage) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise GatewayError("invalid_value", "content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text":
            raise GatewayError(
                "unsupported", f"content of type {part.type!r} is not supported", param=f"{where}.content[{number}]"
            )
        if part.text is None:
            raise GatewayError("invalid_value", "text is missing", param=f"{where}.content[{number}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _validated(model: type[_R], body: bytes) -> _R:
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False, include_input=False)) from None
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and not any(value == allowed for allowed in REFUSED[name]):
            raise GatewayError("unsupported", f"{name} is not supported (or only as a no-op)", param=name)
    return request


def _refusal(errors: Sequence[ErrorDetails]) -> GatewayError:
    first = errors[0]
    if first["type"] == "json_invalid":
        return GatewayError("invalid_json", f"the body is not valid JSON: {first['msg']}")
    param = _param(first["loc"])
    if not param:
        return GatewayError("invalid_json", "the body is not a JSON object")
    reasons = dict.fromkeys(error["msg"] for error in errors if _param(error["loc"]) == param)
    return GatewayError("invalid_value", f"{param}: {' or: '.join(reasons)}", param=param)


def _param(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location; what follows names members of unions."""
    if not loc:
        return ""
    param = str(loc[0])
    rest = loc[1:]
    if param in _NESTED and rest:
        return f"{param}.{rest[0]}"
    if rest and isinstance(rest[0], int):
        param += f"[{rest[0]}]"
        if len(rest) > 1 and param.startswith("messages"):
            param += f".{rest[1]}"
    return param
