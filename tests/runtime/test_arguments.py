"""Another program's arguments as one setting: from a flag, from the environment, from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdq.runtime.arguments import Arguments
from pdq.runtime.errors import SettingsError
from pdq.runtime.settings import resolve

WORDS = ("--block-size", "32", "--enforce-eager", "--speculative-config", '{"method": "ngram", "n": 2}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine_args: Arguments = field(default=Arguments(), metadata={"help": "of the engine"})


def test_a_text_is_split_as_a_shell_does():
    assert Arguments.from_text(
        """--block-size 32 --enforce-eager --speculative-config '{"method": "ngram", "n": 2}'"""
    ) == (WORDS)


def test_a_table_means_the_same_as_the_text():
    table = tomllib.loads('block_size = 32\nenforce-eager = true\nspeculative_config = {method = "ngram", n = 2}')

    assert Arguments.from_toml(table) == WORDS


def test_false_and_lists_in_a_table():
    assert Arguments.from_toml({"enforce_eager": False, "device_ids": [0, 1], "names": ["a", "b"]}) == (
        *("--no-enforce-eager", "--device-ids", "0", "1"),
        *("--names", "a", "b"),
    )


def test_the_text_form_can_be_read_back():
    assert Arguments.from_text(str(Arguments(WORDS))) == WORDS


def test_the_names_are_those_that_settings_would_have():
    arguments = Arguments.from_text("--block_size=32 -tp 2 --no-enforce-eager --compilation-config.mode 3")

    assert arguments.names == {"block_size", "enforce_eager", "compilation_config"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--tensor-parallel-size 2", "2"),
        ("--tensor_parallel_size=4", "4"),
        ("-tp 8", "8"),
        ("-tp 8 -tp 2", "2"),
        ("--dtype float32", None),
        ("--tensor-parallel-size", None),
    ],
)
def test_the_value_of_a_flag_is_what_follows_it(text, expected):
    assert Arguments.from_text(text).value_of("--tensor-parallel-size", "-tp") == expected


@pytest.mark.parametrize("toml", ["engine_args = '--block-size 32'", "[engine_args]\nblock-size = 32"])
def test_in_a_file_text_and_table_do(tmp_path: Path, toml):
    path = tmp_path / "pdq.toml"
    path.write_text(toml)

    loaded = resolve(Settings, ["--config", str(path)], {}, role="decode_worker")

    assert loaded.settings.engine_args == ("--block-size", "32")


def test_what_print_config_shows_can_be_loaded_again(tmp_path: Path):
    loaded = resolve(Settings, ["--engine-args", "--dtype float32 --x 'a b'"], {}, role="decode_worker")
    path = tmp_path / "pdq.toml"
    path.write_text(loaded.config_text)

    again = resolve(Settings, ["--config", str(path)], {}, role="decode_worker")

    assert again.settings == loaded.settings


@pytest.mark.parametrize("value", ["--x 'never ends", "--name \\"])
def test_a_text_that_no_shell_would_take_is_refused_with_the_setting(value):
    with pytest.raises(SettingsError, match="PDQ_ENGINE_ARGS"):
        resolve(Settings, [], {"PDQ_ENGINE_ARGS": value}, role="decode_worker")


def test_a_number_is_not_taken_for_arguments(tmp_path: Path):
    path = tmp_path / "pdq.toml"
    path.write_text("engine_args = 3")

    with pytest.raises(SettingsError, match="engine_args"):
        resolve(Settings, ["--config", str(path)], {}, role="decode_worker")
