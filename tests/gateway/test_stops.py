"""Stop strings: the text that comes out depends on the text that went in, not on how it was cut."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gateway.stops import StopStrings

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


def fed(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    it = StopStrings(stops, include=include)
    text = "".join([it.feed(piece) for piece in pieces])
    return text + it.flush(), it.matched


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6), include=st.booleans())
@settings(max_examples=200)
def test_any_split_gives_the_same_text(text, stops, cuts, include):
    at = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(at)]

    assert fed(stops, pieces, include=include) == fed(stops, list(text), include=include)


@given(text=TEXT, stops=STOPS)
@settings(max_examples=200)
def test_no_stop_string_is_ever_in_the_text(text, stops):
    result, matched = fed(stops, list(text))

    assert not any(stop in result for stop in stops)
    assert text.startswith(result)
    assert (matched is None) == (not any(stop in text for stop in stops))


def test_text_that_can_not_become_a_stop_string_is_not_held_back():
    it = StopStrings(("END",))

    assert it.feed("abE") == "ab"
    assert it.feed("x") == "Ex"
    assert it.feed("EN") == ""
    assert it.feed("D more") == ""
    assert it.matched == "END"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab\n")])
def test_the_stop_string_is_in_the_text_only_on_request(include, text):
    assert fed(("\n",), ["ab", "\n", "c"], include=include) == (text, "\n")


def test_skipped_text_may_contain_a_stop_string():
    it = StopStrings(("a",))

    assert it.skip("aaa") == "aaa"
    assert it.feed("ba") == "b"
