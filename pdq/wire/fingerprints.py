"""Fingerprints: readable `key=value` pairs of all that must be equal between two processes. Compared field by field."""

from __future__ import annotations

import re


def differing(here: str, there: str, *, other: str = "at the peer") -> str:
    """The fields of two fingerprints that differ, with both values; empty when they are equal.

    `other` says where `there` is.
    """
    if here == there:
        return ""
    mine, theirs = _fields(here), _fields(there)
    return (
        "; ".join(
            f"{name}: {mine.get(name, 'missing')} here, {theirs.get(name, 'missing')} {other}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        )
        or f"fingerprint: {here!r} here, {there!r} {other}"
    )


def _fields(fingerprint: str) -> dict[str, str]:
    return dict(re.findall(r"([\w.-]+)=([^\s;,]*)", fingerprint))
