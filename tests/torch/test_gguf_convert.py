"""GGUF files become Hugging Face folders with the same weights and the same tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.errors import ModelError, no_progress
from engine.models.gguf_convert import convert_gguf, unpermute_rows
from tests.torch.tiny import HEADS, HIDDEN, KV_HEADS, SPECIAL, TEMPLATE, write_tiny_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    weights = write_tiny_gguf(folder / "tiny.gguf")
    convert_gguf(folder / "tiny.gguf", folder, no_progress)
    return folder, weights


@given(heads=st.integers(1, 5), pairs=st.integers(1, 6), columns=st.integers(1, 4))
@settings(max_examples=50)
def test_a_head_gets_its_even_rows_first_and_its_odd_rows_after_them(heads, pairs, columns):
    rows = heads * pairs * 2
    weight = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)

    by_head = unpermute_rows(weight, heads).reshape(heads, 2, pairs, columns)

    source = weight.reshape(heads, pairs, 2, columns)
    assert np.array_equal(source[:, :, 0], by_head[:, 0])
    assert np.array_equal(source[:, :, 1], by_head[:, 1])


def test_rotating_halves_after_conversion_gives_the_scores_of_rotating_neighbours_before_it():
    rng = np.random.default_rng(1)
    heads, head_dim, hidden = 3, 8, 10
    q, k = (rng.normal(size=(heads * head_dim, hidden)).astype(np.float32) for _ in range(2))
    x, y = rng.normal(size=hidden), rng.normal(size=hidden)
    angles = 1000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))

    def neighbours(vector, position):
        pairs = vector.reshape(heads, head_dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles * position)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads, head_dim)

    def halves(vector, position):
        parts = vector.reshape(heads, 2, head_dim // 2)
        turned = (parts[:, 0] + 1j * parts[:, 1]) * np.exp(1j * angles * position)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    expected = (neighbours(q @ x, 5) * neighbours(k @ y, 2)).sum(-1)
    actual = (halves(unpermute_rows(q, heads) @ x, 5) * halves(unpermute_rows(k, heads) @ y, 2)).sum(-1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_every_weight_arrives_under_its_hugging_face_name(converted):
    from safetensors.numpy import load_file

    folder, weights = converted

    found = load_file(folder / "model.safetensors")

    assert len(weights) == len(found)
    assert np.array_equal(weights["blk.1.ffn_down.weight"], found["model.layers.1.mlp.down_proj.weight"])
    assert np.array_equal(weights["token_embd.weight"], found["model.embed_tokens.weight"])
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        expected = unpermute_rows(weights[f"blk.0.attn_{name}.weight"], heads)
        assert np.array_equal(expected, found[f"model.layers.0.self_attn.{name}_proj.weight"])


def test_transformers_loads_the_folder_with_no_weight_missing(converted):
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(converted[0], output_loading_info=True)

    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.hidden_size == HIDDEN
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == 2


def test_merges_and_special_tokens_work_in_the_tokenizer(converted):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))

    assert tokenizer.encode("the the").tokens == ["t", "he", "Ġthe"]
    assert [SPECIAL[1], "h", "i", SPECIAL[2]] == tokenizer.encode("<|im_start|>hi<|im_end|>").tokens
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hi").ids) == "hi"


def test_the_chat_template_is_kept(converted):
    config = json.loads((converted[0] / "tokenizer_config.json").read_text())

    assert config["chat_template"] == TEMPLATE
    assert SPECIAL[2] == config["eos_token"]


def test_other_architectures_are_refused_by_name(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", architecture="mamba")

    with pytest.raises(ModelError, match="'mamba'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, no_progress)


def test_unknown_pre_tokenizers_are_refused_by_name(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", pre="llama-bpe")

    with pytest.raises(ModelError, match="'llama-bpe'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, no_progress)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GIF89a" * 100)

    with pytest.raises(ModelError, match="not a readable GGUF file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path, no_progress)
