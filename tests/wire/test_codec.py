from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
from dataclasses import dataclass
from typing import get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.messages import (
    Notice,
)
from engine.base import EngineRequest
from pdq.wire.codec import Codec, DecodeError, EncodeError
from pdq.wire.types import pack_ids, unpack_ids

NOTICES: Codec[Notice] = Codec(Notice)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class One:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    text: str
    raw: bytes
    yes: bool
    real: float
    colour: Colour
    either: Empty | One | None
    several: tuple[Empty | One, ...] = ()
    table: dict[str, One] = dataclasses.field(default_factory=dict)
    nested: tuple[tuple[int, ...], ...] = ()
    maybe: int | None = None
    default_but_none: int | None = 7


EVERYTHING: Codec[Everything] = Codec(Everything)
FULL = Everything(
    text="é",
    raw=b"\0\xff",
    yes=True,
    real=0.5,
    colour=Colour.BLUE,
    either=One(number=1),
    several=(Empty(), One(number=2)),
    table={"a": One(number=3)},
    nested=((1, 2), ()),
    maybe=4,
    default_but_none=None,
)


def packed(kind="One", body=None, **envelope):
    return msgpack.packb({"v": 1, "kind": kind, "ref": 0, "body": body, **envelope})


SCALARS = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=10),
    bytes: st.binary(max_size=10),
    type(None): st.none(),
}


def strategy(hint):
    """Values of a type that the codec takes. Hypothesis's own `from_type` would draw ints beyond 64 bits."""
    if hint in SCALARS:
        return SCALARS[hint]
    if get_origin(hint) is types.UnionType:
        return st.one_of(*map(strategy, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(strategy(get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    hints = get_type_hints(hint)
    return st.builds(hint, **{field.name: strategy(hints[field.name]) for field in dataclasses.fields(hint)})


notices = strategy(Notice)


@given(notice=notices, ref=st.integers(0, 2**63))
@settings(max_examples=200, deadline=None)
def test_every_notice_survives_the_round_trip(notice, ref):
    assert NOTICES.decode(NOTICES.encode(notice, ref=ref)) == (notice, ref)


@given(request=strategy(EngineRequest))
@settings(max_examples=100, deadline=None)
def test_engine_requests_with_tagged_unions_survive_the_round_trip(request):
    codec = Codec(EngineRequest)

    assert codec.decode(codec.encode(request)) == (request, 0)


@pytest.mark.parametrize("value", [FULL, dataclasses.replace(FULL, either=None, maybe=None, several=(), table={})])
def test_every_kind_of_field_survives_the_round_trip(value):
    assert EVERYTHING.decode(EVERYTHING.encode(value, ref=5)) == (value, 5)


def test_fields_that_are_none_by_default_are_not_sent():
    body = msgpack.unpackb(EVERYTHING.encode(dataclasses.replace(FULL, maybe=None)))["body"]

    assert "maybe" not in body
    assert body["default_but_none"] is None


def test_unknown_fields_of_a_newer_version_are_ignored():
    assert Codec(One).decode(packed(body={"number": 1, "colour": "red"}, sent_by="newer")) == (One(number=1), 0)


def test_whole_numbers_are_taken_for_floats():
    body = msgpack.unpackb(EVERYTHING.encode(FULL))["body"] | {"real": 2}

    real = EVERYTHING.decode(packed("Everything", body))[0].real

    assert (real, type(real)) == (2.0, float)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x93\x01", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\xdf\xff\xff\xff\xff", "not msgpack"),
        (b"\xc6\xff\xff\xff\xff", "not msgpack"),
        (b"\xa1\xff", "not msgpack"),
        (b"\x91" * 5000, "not msgpack"),
        (b"\xdd\x00\x00\x10\x00" * 3000, "not msgpack"),
        (b"\xd6\xff\xff\xff\xff\xff", "not an envelope"),
        (msgpack.packb([1, 2]), "not an envelope"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (msgpack.packb({b"v": 1, b"kind": b"One", b"body": {}}), "version"),
        (packed(body={"number": 1}) + b"\0", "not msgpack"),
        (packed(body={"number": 1}, v=2), "version 2"),
        (packed(body={"number": 1}, ref=-1), "ref"),
        (packed(body={"number": 1}, ref=True), "ref"),
        (packed(body={"number": 1}, ref="1"), "ref"),
        (packed(kind="Two", body={}), "unknown kind 'Two'"),
        (packed(kind=["One"], body={}), "unknown kind"),
        (packed(kind=None, body={}), "unknown kind"),
        (packed(body=None), "expected a map"),
        (packed(body=[1]), "expected a map"),
        (packed(body={}), "One: .*number"),
        (packed(body={b"number": 1}), "One: .*number"),
        (packed(body={"number": "1"}), "One: number: expected int, got str"),
        (packed(body={"number": True}), "number: expected int, got bool"),
        (packed(body={"number": 1.0}), "number: expected int, got float"),
        (packed(body={"number": None}), "number: expected int, got NoneType"),
    ],
)
def test_hostile_bytes_give_a_decode_error(data, word):
    with pytest.raises(DecodeError, match=word):
        Codec(One).decode(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", b"x"),
        ("raw", "x"),
        ("yes", 1),
        ("real", True),
        ("real", "1"),
        ("colour", "green"),
        ("colour", 1.5),
        ("colour", ["red"]),
        ("either", {"number": 1}),
        ("either", ["One"]),
        ("either", ["Two", {}]),
        ("either", [["One"], {}]),
        ("either", ["One", {}]),
        ("several", {"a": 1}),
        ("several", [None]),
        ("several", [["One", {"number": "x"}]]),
        ("table", []),
        ("table", {"a": 1}),
        ("table", {b"a": {"number": 1}}),
        ("nested", [1]),
        ("nested", [["x"]]),
        ("maybe", "x"),
    ],
)
def test_a_field_of_another_shape_is_named_in_the_error(field, value):
    body = msgpack.unpackb(EVERYTHING.encode(FULL))["body"] | {field: value}

    with pytest.raises(DecodeError, match=f"Everything: {field}"):
        EVERYTHING.decode(packed("Everything", body))


@given(data=st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_give_only_decode_errors(data):
    with pytest.raises(DecodeError):
        NOTICES.decode(data)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
keys = st.sampled_from([field.name for cls in Notice.__args__ for field in dataclasses.fields(cls)])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | st.binary(), inner, max_size=6)
)


@given(kind=st.sampled_from([cls.__name__ for cls in Notice.__args__]), body=values)
@settings(max_examples=200, deadline=None)
def test_wrong_shapes_give_only_decode_errors(kind, body):
    with contextlib.suppress(DecodeError):
        NOTICES.decode(packed(kind, body))


@given(notice=notices, position=st.integers(0, 2**16), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_gives_a_message_or_a_decode_error(notice, position, byte):
    data = bytearray(NOTICES.encode(notice))
    data[position % len(data)] = byte
    with contextlib.suppress(DecodeError):
        NOTICES.decode(bytes(data))


@pytest.mark.parametrize("value", [dataclasses.replace(FULL, maybe=2**64), dataclasses.replace(FULL, text="\ud800")])
def test_values_without_a_wire_form_are_an_encode_error(value):
    with pytest.raises(EncodeError, match="Everything"):
        EVERYTHING.encode(value)


def test_a_message_of_another_union_is_refused():
    with pytest.raises(TypeError, match="One"):
        NOTICES.encode(One(number=1))


@dataclass
class Odd:
    value: complex


@pytest.mark.parametrize("union", [int, int | str, Odd, One | Odd])
def test_types_without_a_wire_form_are_refused_at_once(union):
    with pytest.raises(TypeError):
        Codec(union)


@given(ids=st.lists(st.integers(0, 2**32 - 1)))
@settings(max_examples=100, deadline=None)
def test_token_ids_survive_packing(ids):
    assert unpack_ids(pack_ids(ids)) == ids
