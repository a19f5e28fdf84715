"""Fingerprints are compared field by field."""

from __future__ import annotations

from pdq.wire.fingerprints import differing, number_in


def test_the_fields_that_differ_are_named_with_both_values() -> None:
    assert differing("model=a dtype=float32 layers=4", "model=a dtype=float16 layers=4") == (
        "dtype: float32 here, float16 at the peer"
    )


def test_a_field_that_only_one_side_has_is_missing_at_the_other() -> None:
    assert differing("a=1", "a=1 mode=pull", other="there") == "mode: missing here, pull there"


def test_equal_fingerprints_have_no_difference() -> None:
    assert differing("a=1 b=2", "a=1 b=2") == ""


def test_ignored_fields_may_differ():
    assert differing("tp=2 dtype=a", "tp=1 dtype=a", ignored=("tp",)) == ""
    assert differing("tp=2 dtype=a", "tp=1 dtype=b", ignored=("tp",)) == "dtype: a here, b at the peer"
    assert differing("whatever", "else", ignored=("tp",)) == "fingerprint: 'whatever' here, 'else' at the peer"


def test_numbers_are_read_out_of_a_fingerprint():
    assert number_in("kv_heads=3 tp=16", "tp", 1) == 16
    assert number_in("kv_heads=3", "tp", 1) == 1
    assert number_in("tp=many", "tp", 1) == 1
