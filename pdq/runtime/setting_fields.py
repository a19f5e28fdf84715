"""The settings of a dataclass: its leaves, their names, units, allowed forms, and how text or TOML becomes a value.

A setting is a leaf field with `metadata={"help": ...}`. Fields whose type is a dataclass are components; their leaves
are settings of the process too. Names are unique over all components. `metadata={"internal": True}` keeps a field out.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pdq.runtime.arguments import Arguments

MISSING: Final = dataclasses.MISSING
_UNITS: Final = {
    "_ms": "milliseconds",
    "_us": "microseconds",
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf. `component` is the title under which `--help` shows it."""

    name: str
    type: Any
    default: Any
    help: str
    component: str
    unit: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.type is bool


def settings_of(cls: type) -> list[Setting]:
    """All leaves in order of definition. Raises TypeError when two components use one name or a leaf has no help."""
    found = list(_leaves(cls, MISSING))
    seen: dict[str, Setting] = {}
    for setting in found:
        if setting.name in seen:
            raise TypeError(f"setting {setting.name} is in {seen[setting.name].component} and {setting.component}")
        seen[setting.name] = setting
    return found


def build(cls: type, values: dict[str, Any], default: Any = MISSING) -> Any:
    """An instance of `cls` with `values` (by setting name) in its leaves. Raises what `__post_init__` raises."""
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = build(hints[field.name], values, _default_of(field, default))
        elif field.name in values:
            arguments[field.name] = values[field.name]
        elif default is not MISSING:
            arguments[field.name] = getattr(default, field.name)
    return cls(**arguments)


def _leaves(cls: type, default: Any) -> Iterator[Setting]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init or field.metadata.get("internal"):
            continue
        kind = hints[field.name]
        own = _default_of(field, default)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _leaves(kind, own)
            continue
        if "help" not in field.metadata:
            raise TypeError(f"{cls.__name__}.{field.name}: a setting needs metadata={{'help': ...}}")
        unit = field.metadata.get("unit") or next((u for end, u in _UNITS.items() if field.name.endswith(end)), "")
        yield Setting(
            name=field.name, type=kind, default=own, help=field.metadata["help"], component=_title(cls), unit=unit
        )


def _default_of(field: dataclasses.Field[Any], owner: Any) -> Any:
    if owner is not MISSING:
        return getattr(owner, field.name)
    made: Any = field.default_factory
    return field.default if made is MISSING else made()


def _title(cls: type) -> str:
    name = cls.__name__.removesuffix("Settings") or cls.__name__
    return "".join(" " + c.lower() if c.isupper() else c for c in name).strip()


def form(kind: Any) -> str:
    """The allowed form, for messages and `--help`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("none" if a is types.NoneType else form(a) for a in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"comma-separated list, each {form(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if kind is Arguments:
        return "arguments in one text, '--name value --flag'; in TOML also a table"
    return {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}[kind]


def parse_text(kind: Any, text: str) -> Any:
    """From a flag or an environment variable. Raises ValueError when `text` has not the allowed form."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        return parse_text(_without_none(arguments), text)
    if origin is tuple:
        return tuple(parse_text(arguments[0], part.strip()) for part in text.split(",") if part.strip())
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return _choice(kind, text)
    if kind is Arguments:
        return Arguments.from_text(text)
    if kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
    return _checked(kind(text))


def parse_toml(kind: Any, value: object) -> Any:
    """From a TOML value. Raises ValueError when it has not the allowed form; `"none"` stands for None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value == "none" else parse_toml(_without_none(arguments), value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(value)
        return tuple(parse_toml(arguments[0], item) for item in value)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return _choice(kind, value)
    if kind is Arguments:
        return Arguments.from_toml(value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise ValueError(value)
    return _checked(value)


def _without_none(arguments: tuple[Any, ...]) -> Any:
    rest = [a for a in arguments if a is not types.NoneType]
    if len(rest) != 1:
        raise TypeError(f"a setting may be X or X | None, not {arguments}")
    return rest[0]


def _choice(kind: Any, value: object) -> Any:
    if typing.get_origin(kind) is Literal:
        return next(c for c in typing.get_args(kind) if str(c) == str(value))
    return next(member for member in kind if str(member.value) == str(value))


def _checked(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    return value
