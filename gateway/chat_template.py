"""Renders a model's chat template as transformers does: sandboxed jinja2, same helpers, same special tokens.

Found in `chat_template.jinja`, else in `tokenizer_config.json` (`chat_template`: text, or a list with a `default`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import GatewayError

_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Messages -> prompt text, special tokens included."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """Raises GatewayError (400) when the template refuses these messages."""
        values = {**extra, **self._special_tokens, "messages": list(messages), "tools": None, "documents": None}
        try:
            return self._template.render(values, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise GatewayError("invalid_value", message, param="messages") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """None: the model has none. Raises jinja2.TemplateSyntaxError, OSError, ValueError."""
    config: dict[str, Any] = {}
    config_path = folder / "tokenizer_config.json"
    if config_path.exists():
        config = json.loads(config_path.read_text(encoding="utf-8"))
    template_path = folder / "chat_template.jinja"
    source = template_path.read_text(encoding="utf-8") if template_path.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = next((item["template"] for item in source if item.get("name") == "default"), None)
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only passed through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    @staticmethod
    def _through(caller: Any) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
