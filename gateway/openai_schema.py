"""Request bodies of the OpenAI API as pydantic models: types and ranges. Meaning is checked in `parsing.py`.

Fields that are known and can't be honoured are in REFUSED: any other value than those listed is a 400 `unsupported`.
Fields that nobody knows are ignored, as OpenAI's own servers of old did and clients expect.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]

REFUSED: Final[dict[str, tuple[object, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "images": (None, []),
    "prediction": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None,),
    "continue_final_message": (None, False),
    "lora_request": (None,),
    "kv_transfer_params": (None,),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class Common(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str = Field(description="Name of the served model, see /v1/models.")
    max_tokens: int | None = Field(None, description="Default: what is left of the context.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = Field(None, description="Up to 16 strings.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: _Int64 | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1: off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = Field(None, description="type: text, json_object or json_schema.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="vLLM's: one of json, json_object, regex, choice, grammar."
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="Adds token_ids to each choice, prompt_token_ids once.")
    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(None, description="Lower goes first.")
    request_timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Deadline of this request; bounded by the server's request_deadline_s."
    )


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatRequest(Common):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, description="Takes precedence over max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Common):
    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
