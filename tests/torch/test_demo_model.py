"""The demo model's tokenizer and chat template, converted from its GGUF file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def fast(model_dir):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  leading, trailing and   inner spaces  \n\n\ttabs\r\n",
        "Grüße aus Köln, 東京 and Владивосток",
        "emoji 👩‍👩‍👧‍👦 🇩🇪 and combining é",
        "digits 1234567890 and x=3.14159",
        "it's we'll THEY'RE don't",
        "",
    ],
)
def test_text_survives_encoding_and_decoding(fast, text):
    assert text == fast.decode(fast.encode(text).ids, skip_special_tokens=False)


# the model's vocabulary has no token for these control characters, nor for the first byte of unassigned planes
_ENCODABLE = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\x04\x06\x13\x14\x16\x1d")


@given(text=st.text(_ENCODABLE, max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_encodable_text_survives_encoding_and_decoding(fast, text):
    assert text == fast.decode(fast.encode(text).ids, skip_special_tokens=False)


def test_digits_are_tokens_of_their_own(fast):
    assert fast.encode("123").tokens == ["1", "2", "3"]


def test_special_tokens_are_one_id_and_skipped_on_request(fast):
    encoded = fast.encode("<|im_start|>user\nhi<|im_end|>")

    assert encoded.ids[0] == 1
    assert encoded.ids[-1] == 2
    assert fast.decode(encoded.ids, skip_special_tokens=True) == "user\nhi"


def test_a_multi_byte_character_split_over_tokens_comes_out_whole_when_streamed(fast):
    from tokenizers.decoders import DecodeStream

    text = "naïve 🦄𓀀 日本"
    stream, pieces = DecodeStream(skip_special_tokens=True), []
    for token_id in fast.encode(text).ids:
        pieces.append(stream.step(fast, token_id))

    assert None in pieces
    assert text == "".join(piece for piece in pieces if piece)


def test_no_begin_of_sequence_token_is_added(fast, tokenizer):
    assert (
        fast.encode("Hello").ids == tokenizer("Hello").input_ids == fast.encode("Hello", add_special_tokens=False).ids
    )


def test_the_chat_template_renders_with_its_default_system_message(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )

    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_end_of_sequence_is_the_end_of_a_chat_turn(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
