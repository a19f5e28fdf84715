"""Fingerprints: readable `key=value` pairs of all that must be equal between two processes. Compared field by field."""

from __future__ import annotations

import re
from collections.abc import Collection


def differing(here: str, there: str, *, other: str = "at the peer", ignored: Collection[str] = ()) -> str:
    """The fields of two fingerprints that differ, with both values; empty when they are equal but for ignored fields.

    `other` says where `there` is.
    """
    if here == there:
        return ""
    mine, theirs = _fields(here), _fields(there)
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if not names:
        return f"fingerprint: {here!r} here, {there!r} {other}"
    return "; ".join(
        f"{name}: {mine.get(name, 'missing')} here, {theirs.get(name, 'missing')} {other}"
        for name in names
        if name not in ignored
    )


def number_in(fingerprint: str, name: str, default: int) -> int:
    """The value of a field that holds a number; `default` when there is none."""
    value = _fields(fingerprint).get(name, "")
    return int(value) if value.isdecimal() else default


def _fields(fingerprint: str) -> dict[str, str]:
    return dict(re.findall(r"([\w.-]+)=([^\s;,]*)", fingerprint))
