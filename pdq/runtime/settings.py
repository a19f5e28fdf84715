"""Settings of a process: flag > environment > TOML > default, into one frozen dataclass.

The one module that reads the environment.

Sources, strongest first, for a setting `lease_s` of the role `prefill_worker`:
  flag          --lease-s 6          (bool: --x / --no-x; tuples: a,b,c; None: none)
  environment   PDQ_PREFILL_WORKER__LEASE_S, then PDQ_LEASE_S
  TOML          [prefill_worker] lease_s = 6.0, then lease_s = 6.0 at the top (file: --config or PDQ_CONFIG)
  default       of the dataclass field
Names and tables of another role are left to that role. An unscoped name holds for every process that knows it; one that
only others know is left to them, one that nobody knows is an error.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from pdq.runtime.errors import SettingsError
from pdq.runtime.setting_fields import MISSING, Setting, build, form, parse_text, parse_toml, settings_of
from pdq.runtime.setting_names import NAMES
from pdq.runtime.setting_text import config_text, help_text

T = TypeVar("T")
ROLES: Final = ("gateway", "prefill_worker", "decode_worker", "up", "demo")
_PREFIX: Final = "PDQ_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    settings: T
    origins: Mapping[str, str]
    """Per setting: `flag --x`, `environment PDQ_X`, `FILE.toml`, or `default`."""
    config_text: str
    """What `--print-config` prints."""
    is_print_config: bool
    config_path: Path | None
    """The TOML file that was read."""


def load(
    cls: type[T],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    prog: str,
    description: str = "",
    role: str | None = None,
) -> Loaded[T]:
    """As `resolve`, with sys.argv and os.environ as defaults; ends the process after --help and --print-config (0)
    and after a bad setting (2, message on stderr). `role` defaults to the last word of `prog`."""
    argv = sys.argv[1:] if argv is None else argv
    role = role or prog.split()[-1].replace("-", "_")
    if "--help" in argv or "-h" in argv:
        _show(help_text(prog, description, settings_of(cls), role))
        raise SystemExit(0)
    try:
        loaded = resolve(cls, argv, environment() if environ is None else environ, role=role)
    except SettingsError as error:
        _exit_bad_settings(prog, error)
    if loaded.is_print_config:
        _show(loaded.config_text)
        raise SystemExit(0)
    return loaded


def environment() -> Mapping[str, str]:
    """This process's environment variables."""
    return os.environ  # noqa: TID251 - the one place that may


def set_environment(values: Mapping[str, str], *, keep: bool) -> None:
    """For libraries that read the environment when they are loaded; this process's children inherit it.

    `keep`: what the user has set stays.
    """
    for name, value in values.items():
        if not (keep and name in os.environ):  # noqa: TID251 - the one place that may
            os.environ[name] = value  # noqa: TID251


def resolve(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], *, role: str) -> Loaded[T]:
    """Finds each setting's value and origin. Raises SettingsError naming key, source and allowed form."""
    settings = settings_of(cls)
    known = {s.name: s for s in settings}
    flags, config, is_print_config = _read_flags(argv, known)
    values: dict[str, Any] = {s.name: s.default for s in settings if s.default is not MISSING}
    origins = {name: "default" for name in values}
    config = config or environ.get(_PREFIX + "CONFIG")
    if config:
        for name, value in _read_toml(Path(config), known, role).items():
            values[name], origins[name] = value, config
    for name, (variable, text) in _read_environment(environ, known, role).items():
        values[name], origins[name] = _parsed(known[name], text, variable), f"environment {variable}"
    for name, text in flags.items():
        values[name], origins[name] = _parsed(known[name], text, known[name].flag), f"flag {known[name].flag}"
    for setting in settings:
        if setting.name not in values:
            raise SettingsError(f"{setting.flag} is required ({form(setting.type)}): {setting.help}")
    try:
        built = build(cls, values)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return Loaded(
        settings=built,
        origins=origins,
        config_text=config_text(settings, values, origins),
        is_print_config=is_print_config,
        config_path=Path(config) if config else None,
    )


def _read_flags(argv: Sequence[str], known: Mapping[str, Setting]) -> tuple[dict[str, str], str | None, bool]:
    texts: dict[str, str] = {}
    config: str | None = None
    is_print_config = False
    rest = list(argv)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        name = flag[2:].replace("-", "_")
        if flag == "--print-config":
            is_print_config = True
            continue
        if not has_value:
            negated = known.get(name.removeprefix("no_"))
            if negated is not None and negated.is_bool and flag.startswith("--"):
                texts[negated.name] = "false" if name.startswith("no_") and name not in known else "true"
                continue
        if not flag.startswith("--") or "_" in flag or (name not in known and flag != "--config"):
            raise SettingsError(f"unknown flag {flag}{_meant(flag, [s.flag for s in known.values()])}; see --help")
        if not has_value:
            if not rest:
                allowed = "a path" if flag == "--config" else form(known[name].type)
                raise SettingsError(f"{flag} needs a value ({allowed})")
            value = rest.pop(0)
        if flag == "--config":
            config = value
        else:
            texts[name] = value
    return texts, config, is_print_config


def _read_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], role: str
) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(_PREFIX) or variable == _PREFIX + "CONFIG":
            continue
        scope, is_scoped, name = variable.removeprefix(_PREFIX).lower().rpartition("__")
        if is_scoped and scope != role and scope in ROLES:
            continue
        if not is_scoped and name not in known and name in NAMES:
            continue
        if name not in known or (is_scoped and scope != role):
            meant = _meant(variable, [_PREFIX + n.upper() for n in {*known, *NAMES}])
            raise SettingsError(f"unknown environment variable {variable} for {role}{meant}")
        if is_scoped or name not in found:
            found[name] = (variable, text)
    return found


def _read_toml(path: Path, known: Mapping[str, Setting], role: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"can't read {path}: {error}") from error
    own = content.get(role, {})
    common = {k: v for k, v in content.items() if not (k in (*ROLES, role) and isinstance(v, dict))}
    values: dict[str, Any] = {}
    for name, value in [*common.items(), *own.items()]:
        if name not in known and name in NAMES and name not in own:
            continue
        if name not in known:
            raise SettingsError(f"{path}: unknown key {name} for {role}{_meant(name, [*known, *NAMES])}")
        try:
            values[name] = parse_toml(known[name].type, value)
        except (ValueError, StopIteration) as error:
            raise SettingsError(_bad_value(known[name], value, f"{path}: {name}")) from error
    return values


def _parsed(setting: Setting, text: str, source: str) -> Any:
    try:
        return parse_text(setting.type, text)
    except (ValueError, KeyError, StopIteration) as error:
        raise SettingsError(_bad_value(setting, text, source)) from error


def _bad_value(setting: Setting, value: object, source: str) -> str:
    unit = f" ({setting.unit})" if setting.unit else ""
    return f"{source}: {value!r} is not allowed; {form(setting.type)}{unit}"


def _meant(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a pager or `head` has seen enough; the exit must not fail on it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_bad_settings(prog: str, error: SettingsError) -> NoReturn:
    print(f"{prog}: {error}", file=sys.stderr)
    raise SystemExit(2)
