"""The reason of a failed transfer -> one of a few kinds, to be counted. Pure."""

from __future__ import annotations

from typing import Final

FAILED: Final = "failed:"
"""Name of a counter: this and the kind."""
_KINDS: Final = (
    ("kv params", "params"),
    ("fingerprints differ", "misfit"),
    ("block size", "misfit"),
    ("layers differ", "misfit"),
    ("heads", "misfit"),
    ("P says gone", "gone"),
    ("restarted", "gone"),
    ("does not answer", "silent"),
    ("has not answered", "silent"),
    ("not read within", "timeout"),
    ("not written within", "timeout"),
    ("read failed", "transport"),
    ("transport was replaced", "transport"),
    ("read of another request failed", "transport"),
    ("write failed", "transport"),
    ("P failed", "prefill"),  # after all kinds of failure that P may tell of
)
KINDS: Final = (*dict.fromkeys(kind for _, kind in _KINDS), "other")


def kind_of(reason: str) -> str:
    """One of KINDS."""
    return next((kind for text, kind in _KINDS if text in reason), "other")
