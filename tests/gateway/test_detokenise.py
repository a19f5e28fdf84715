"""Tokens to text: whole characters only, and in all exactly what decoding everything at once gives."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gateway.detokenise import ByteDecoder, StreamDecoder
from gateway.tokenizer import ByteTokenizer, ModelTokenizer
from tests.gateway.tokenizers_ import byte_fallback, byte_level

SMILE = "🙂"


def pieces_of(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    at = sorted({0, len(token_ids), *(cut for cut in cuts if cut <= len(token_ids))})
    return [token_ids[start:end] for start, end in itertools.pairwise(at)]


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=10))
@settings(max_examples=150)
def test_any_split_of_the_tokens_gives_the_whole_text(text, cuts):
    tokenizer = byte_level()
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, context=[])

    result = "".join([decoder.feed(piece) for piece in pieces_of(token_ids, cuts)]) + decoder.flush()

    assert result == tokenizer.decode(token_ids) == text


@given(token_ids=st.lists(st.integers(0, 319), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=10))
@settings(max_examples=150)
def test_token_soup_gives_what_decoding_at_once_gives(token_ids, cuts):
    tokenizer = byte_level()
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, context=[])

    result = "".join([decoder.feed(piece) for piece in pieces_of(token_ids, cuts)]) + decoder.flush()

    assert result == tokenizer.decode(token_ids)


def test_a_character_of_several_tokens_comes_whole():
    tokenizer = byte_level()
    token_ids = tokenizer.encode(SMILE, add_special_tokens=False).ids
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, context=[])
    assert len(token_ids) > 1

    assert [decoder.feed([token_id]) for token_id in token_ids] == [""] * (len(token_ids) - 1) + [SMILE]


def test_endless_replacement_characters_are_not_held_back_for_ever():
    tokenizer = byte_level()
    token_id = tokenizer.encode(SMILE, add_special_tokens=False).ids[-1]
    decoder = StreamDecoder(tokenizer, skip_special_tokens=True, context=[])

    texts = [decoder.feed([token_id]) for _ in range(200)]

    assert sum(map(bool, texts)) >= 2
    assert "".join(texts) + decoder.flush() == tokenizer.decode([token_id] * 200)


def test_the_text_before_decides_about_a_space():
    tokenizer = byte_fallback()
    token_ids = tokenizer.encode("Hello world", add_special_tokens=False).ids

    alone = StreamDecoder(tokenizer, skip_special_tokens=True, context=[]).feed(token_ids)
    after = StreamDecoder(tokenizer, skip_special_tokens=True, context=token_ids).feed(token_ids)

    assert (alone, after) == ("Hello world", " Hello world")


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=10))
@settings(max_examples=150)
def test_the_byte_decoder_gives_what_utf_8_gives(data, cuts):
    decoder = ByteDecoder()

    result = "".join([decoder.feed(piece) for piece in pieces_of(list(data), cuts)]) + decoder.flush()

    assert result == data.decode("utf-8", "replace")


@given(text=st.text(max_size=40))
@settings(max_examples=100)
def test_token_bytes_add_up_to_the_text(text):
    tokenizer = ModelTokenizer(byte_level(), None, None)
    token_ids = byte_level().encode(text, add_special_tokens=False).ids

    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@pytest.mark.parametrize(("token_id", "data"), [(65, b"A"), (0xF0, b"\xf0"), (256, b""), (257, b"")])
def test_special_tokens_of_the_byte_tokenizer_have_no_text(token_id, data):
    assert ByteTokenizer().token_bytes(token_id) == data
