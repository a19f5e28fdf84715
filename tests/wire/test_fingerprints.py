"""Fingerprints are compared field by field."""

from __future__ import annotations

from pdq.wire.fingerprints import differing


def test_the_fields_that_differ_are_named_with_both_values() -> None:
    assert differing("model=a dtype=float32 layers=4", "model=a dtype=float16 layers=4") == (
        "dtype: float32 here, float16 at the peer"
    )


def test_a_field_that_only_one_side_has_is_missing_at_the_other() -> None:
    assert differing("a=1", "a=1 mode=pull", other="there") == "mode: missing here, pull there"


def test_equal_fingerprints_have_no_difference() -> None:
    assert differing("a=1 b=2", "a=1 b=2") == ""
