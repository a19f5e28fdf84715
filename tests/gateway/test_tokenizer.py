"""Loading a model's tokenizer and rendering its chat template."""

from __future__ import annotations

import json

import pytest

from gateway.chat_template import ChatTemplate
from gateway.errors import GatewayError
from gateway.tokenizer import read_tokenizer
from pdq.runtime.errors import StartupError
from tests.gateway.tokenizers_ import byte_level

MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "hé"}]


def render(source: str, **extra: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(MESSAGES, add_generation_prompt=True, extra=extra)


def test_a_template_sees_what_transformers_gives_it():
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if loop.first %}{% continue %}{% endif %}\n"
        "[{{ m['role'] }}] {{ m['content'] | tojson }}{{ eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{% generation %}[assistant]{% endgeneration %}{% endif %}"
        "{{ '' if strftime_now('%Y') | length == 4 else 'no year' }}{{ style }}"
    )

    assert render(source, style="!", messages="mine") == '<s>[user] "hé"</s>\n[assistant]!'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1] }}"],
)
def test_what_a_template_refuses_or_may_not_do_is_the_client_s_error(source):
    with pytest.raises(GatewayError) as caught:
        render(source)

    assert (caught.value.error_code, caught.value.param) == ("invalid_value", "messages")


@pytest.mark.parametrize("place", ["jinja", "config", "list"])
async def test_a_model_folder_gives_tokenizer_template_and_limit(tmp_path, place):
    source = "{{ bos_token }}{{ messages[0].content }}"
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": {"content": "<|im_start|>"}}
    if place == "jinja":
        (tmp_path / "chat_template.jinja").write_text(source)
    else:
        config["chat_template"] = source if place == "config" else [{"name": "default", "template": source}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))

    tokenizer = read_tokenizer(tmp_path)

    text = tokenizer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True, extra={})
    assert text == "<|im_start|>hi"
    assert tokenizer.max_model_len == 2048
    assert (await tokenizer.encode(text, add_special_tokens=False)).count(0) == 1


async def test_long_and_short_texts_are_encoded_the_same(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(tmp_path)
    text = "Hello world, this is a test. " * 500

    assert await tokenizer.encode(text, add_special_tokens=True) == byte_level().encode(text).ids


def test_a_folder_without_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(StartupError, match="save_pretrained"):
        read_tokenizer(tmp_path)


def test_a_broken_tokenizer_or_template_ends_the_start(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match="can't read the tokenizer"):
        read_tokenizer(tmp_path)

    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(StartupError, match="chat template"):
        read_tokenizer(tmp_path)
