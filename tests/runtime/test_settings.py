from __future__ import annotations

import enum
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdq.runtime.errors import SettingsError
from pdq.runtime.setting_fields import settings_of
from pdq.runtime.settings import Loaded, load, resolve


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    lease_s: float = field(default=6.0, metadata={"help": "time to work"})
    max_jobs: int = field(default=4, metadata={"help": "jobs at once"})
    limit_tokens: int | None = field(default=None, metadata={"help": "budget"})

    def __post_init__(self) -> None:
        if self.lease_s <= 0:
            raise ValueError("lease_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    redis: str = field(default="redis://127.0.0.1", metadata={"help": "where the queue is"})
    mode: Literal["push", "pull"] = field(default="pull", metadata={"help": "who moves KV"})
    colour: Colour = field(default=Colour.RED, metadata={"help": "a colour"})
    docs: bool = field(default=True, metadata={"help": "serve /docs"})
    hosts: tuple[str, ...] = field(default=("a", "b"), metadata={"help": "addresses"})
    folder: Path = field(default=Path("x"), metadata={"help": "a folder"})
    token: str | None = field(default=None, metadata={"help": "secret"})
    lease: LeaseSettings = field(default_factory=lambda: LeaseSettings(max_jobs=9))


def read(*argv: str, **environ: str) -> Loaded[DemoSettings]:
    return resolve(DemoSettings, argv, environ, role="gateway")


def message(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(*argv, **environ)
    return str(caught.value)


def test_without_any_source_the_defaults_hold_also_those_of_a_components_owner() -> None:
    loaded = read()

    assert loaded.settings == DemoSettings()
    assert loaded.settings.lease.max_jobs == 9
    assert set(loaded.origins.values()) == {"default"}


def test_flag_beats_environment_beats_toml_beats_default(tmp_path: Path) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text('redis = "toml"\nlease_s = 1\nmax_jobs = 1\n')

    loaded = read("--config", str(toml), "--lease-s", "3", PDQ_LEASE_S="2", PDQ_MAX_JOBS="2")

    assert (loaded.settings.redis, loaded.settings.lease.lease_s, loaded.settings.lease.max_jobs) == ("toml", 3.0, 2)
    assert loaded.origins["redis"] == str(toml)
    assert loaded.origins["lease_s"] == "flag --lease-s"
    assert loaded.origins["max_jobs"] == "environment PDQ_MAX_JOBS"
    assert loaded.origins["docs"] == "default"


def test_a_name_scoped_to_the_role_beats_the_common_one_and_other_roles_names_are_theirs(tmp_path: Path) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text("lease_s = 1\n[gateway]\nlease_s = 2\n[decode_worker]\nunknown_here = 3\n")

    by_table = read(f"--config={toml}").settings.lease.lease_s
    by_variable = read(PDQ_LEASE_S="3", PDQ_GATEWAY__LEASE_S="4", PDQ_DECODE_WORKER__X="5").settings.lease.lease_s

    assert (by_table, by_variable) == (2.0, 4.0)


def test_every_type_is_read_from_text() -> None:
    loaded = read(
        "--no-docs", "--hosts", "c, d", "--folder=/y", "--mode", "push", "--colour", "blue",
        "--limit-tokens", "7", "--token", "none",
    )  # fmt: skip

    assert loaded.settings == DemoSettings(
        docs=False,
        hosts=("c", "d"),
        folder=Path("/y"),
        mode="push",
        colour=Colour.BLUE,
        lease=LeaseSettings(limit_tokens=7, max_jobs=9),
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lease-s", "soon"], "--lease-s: 'soon' is not allowed; number (seconds)"),
        (["--lease-s", "nan"], "--lease-s: 'nan' is not allowed"),
        (["--max-jobs", "1.5"], "--max-jobs: '1.5' is not allowed; whole number"),
        (["--mode", "sideways"], "one of push, pull"),
        (["--limit-tokens", "x"], "whole number or none (tokens)"),
        (["--lease"], "unknown flag --lease"),
        (["--leese-s", "1"], "did you mean --lease-s?"),
        (["--lease_s", "1"], "unknown flag --lease_s"),
        (["--lease-s"], "--lease-s needs a value (number)"),
        (["stray"], "unknown flag stray"),
        (["--lease-s", "0"], "lease_s must be above 0"),
        (["--config", "absent.toml"], "can't read absent.toml"),
    ],
)
def test_a_bad_flag_is_named_with_its_allowed_form(argv: list[str], expected: str) -> None:
    assert expected in message(*argv)


def test_what_only_other_processes_know_is_left_to_them(tmp_path: Path) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text("take_tokens = 100\nlease_s = 3.0\n")

    loaded = read("--config", str(toml), PDQ_EXPECTED_OUTPUT_TOKENS="7")

    assert loaded.settings.lease.lease_s == 3.0
    assert set(loaded.origins) == {setting.name for setting in settings_of(DemoSettings)}


def test_what_only_others_know_is_an_error_where_it_was_meant_for_this_one(tmp_path: Path) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text("[gateway]\ntake_tokens = 100\n")

    assert "unknown key take_tokens for gateway" in message("--config", str(toml))
    assert "unknown environment variable PDQ_GATEWAY__TAKE_TOKENS" in message(PDQ_GATEWAY__TAKE_TOKENS="1")
    assert "unknown flag --take-tokens" in message("--take-tokens", "1")


def test_a_bad_or_unknown_variable_is_named() -> None:
    assert "PDQ_DOCS: 'maybe' is not allowed; true or false" in message(PDQ_DOCS="maybe")
    assert "unknown environment variable PDQ_LEESE_S" in message(PDQ_LEESE_S="1")
    assert "PDQ_GATEWAY__X" in message(PDQ_GATEWAY__X="1")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("leese_s = 1", "unknown key leese_s for gateway (did you mean lease_s?)"),
        ('lease_s = "6"', "lease_s: '6' is not allowed; number (seconds)"),
        ("docs = 1", "docs: 1 is not allowed; true or false"),
        ("max_jobs = true", "max_jobs: True is not allowed; whole number"),
        ('hosts = "a"', "hosts: 'a' is not allowed; comma-separated list"),
        ("lease_s = ", "can't read"),
    ],
)
def test_a_bad_toml_file_is_named_with_its_key(tmp_path: Path, content: str, expected: str) -> None:
    toml = tmp_path / "pd.toml"
    toml.write_text(content)

    assert expected in message("--config", str(toml))


def test_a_setting_without_default_is_required() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Required:
        model: str = field(metadata={"help": "which model"})

    with pytest.raises(SettingsError, match=r"--model is required \(text\): which model"):
        resolve(Required, [], {}, role="gateway")


def test_two_components_with_one_name_are_a_programming_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        one: LeaseSettings = field(default_factory=LeaseSettings)
        two: LeaseSettings = field(default_factory=LeaseSettings)

    with pytest.raises(TypeError, match="lease_s"):
        resolve(Twice, [], {}, role="gateway")


def test_print_config_shows_each_origin_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(DemoSettings, ["--print-config", "--no-docs"], {"PDQ_LEASE_S": "2"}, prog="python -m gateway")

    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert "lease_s = 2.0  # environment PDQ_LEASE_S" in printed
    assert "docs = false  # flag --docs" in printed
    assert 'redis = "redis://127.0.0.1"  # default' in printed


@settings(max_examples=100, deadline=None)
@given(
    redis=st.text(st.characters(codec="utf-8")),
    token=st.none() | st.text(st.characters(codec="utf-8")).filter(lambda t: t.lower() != "none"),
    lease_s=st.floats(min_value=1e-9, allow_infinity=False),
    hosts=st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
    docs=st.booleans(),
    limit_tokens=st.none() | st.integers(),
)
def test_a_printed_config_loads_to_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory,
    redis: str,
    token: str | None,
    lease_s: float,
    hosts: tuple[str, ...],
    docs: bool,
    limit_tokens: int | None,
) -> None:
    wanted = DemoSettings(
        redis=redis,
        token=token,
        hosts=hosts,
        docs=docs,
        lease=LeaseSettings(lease_s=lease_s, limit_tokens=limit_tokens),
    )
    first = tmp_path_factory.mktemp("config") / "first.toml"
    first.write_text(_text_of(wanted), encoding="utf-8")

    loaded = read("--config", str(first))
    second = first.with_name("second.toml")
    second.write_text(loaded.config_text, encoding="utf-8")

    assert loaded.settings == wanted
    assert read("--config", str(second)).settings == wanted


def _text_of(wanted: DemoSettings) -> str:
    from pdq.runtime.setting_fields import settings_of
    from pdq.runtime.setting_text import config_text

    found = settings_of(DemoSettings)
    values = {s.name: getattr(wanted, s.name, None) for s in found} | {
        name: getattr(wanted.lease, name) for name in ("lease_s", "max_jobs", "limit_tokens")
    }
    text = config_text(found, values, {s.name: "default" for s in found})
    tomllib.loads(text)
    return text


def test_help_groups_by_component_and_shows_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(DemoSettings, ["--help"], {}, prog="python -m gateway", description="Serves.")

    printed = capsys.readouterr().out
    assert caught.value.code == 0
    assert printed.index("demo:") < printed.index("lease:") < printed.index("--lease-s VALUE")
    assert "time to work [seconds; number; default 6.0]" in printed
    assert "--docs, --no-docs" in printed


def test_a_bad_setting_ends_the_process_with_2_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(DemoSettings, ["--lease-s", "x"], {}, prog="python -m gateway")

    assert caught.value.code == 2
    assert "python -m gateway: --lease-s: 'x'" in capsys.readouterr().err
