"""Raw Redis replies -> plain values, whether the server or a fake answered as RESP2 or RESP3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(value: Any) -> str:
    """Readable field as str; a missing one as ''."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)


def fields(reply: Any) -> dict[str, str]:
    """A hash or an entry's fields: flat list (RESP2) or map (RESP3)."""
    if isinstance(reply, Mapping):
        return {text(name): text(value) for name, value in reply.items()}
    flat = list(reply or ())
    return {text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def newest_ids(reply: Any) -> dict[str, str]:
    """XREAD's answer as {stream: newest id in it}; list of pairs (RESP2) or map of streams (RESP3)."""
    if not reply:
        return {}
    streams = reply.items() if isinstance(reply, Mapping) else reply
    found: dict[str, str] = {}
    for stream, entries in streams:
        if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], list):
            entries = entries[0]  # some RESP3 answers nest the entries one level deeper
        found[text(stream)] = text(entries[-1][0])
    return found


def info_of(reply: Any) -> dict[str, str]:
    """INFO's text as {name: value}."""
    lines = text(reply).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
