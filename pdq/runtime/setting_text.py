"""What people read of the settings: `--help`, and `--print-config` as TOML that can be loaded again."""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdq.runtime.arguments import Arguments
from pdq.runtime.setting_fields import MISSING, Setting, form


def help_text(prog: str, description: str, settings: list[Setting], role: str) -> str:
    """Grouped by component; each setting with its unit, allowed form and default."""
    lines = [f"usage: {prog} [--setting VALUE ...]", ""]
    if description:
        lines += [description, ""]
    for component, group in itertools.groupby(settings, key=lambda s: s.component):
        lines.append(f"{component}:")
        for setting in group:
            names = f"{setting.flag}, --no-{setting.flag[2:]}" if setting.is_bool else f"{setting.flag} VALUE"
            default = "required" if setting.default is MISSING else f"default {_shown(setting.default)}"
            allowed = [] if setting.is_bool else [form(setting.type)]
            detail = "; ".join(filter(None, [setting.unit, *allowed, default]))
            lines += [f"  {names}", f"      {setting.help} [{detail}]"]
        lines.append("")
    first = settings[0].name if settings else "name"
    lines += [
        "general:",
        f"  --config FILE.toml\n      keys as the settings above with _ for -; a table [{role}] is for this role only",
        "  --print-config\n      shows every value and where it comes from, as TOML, and exits",
        "  --help\n      shows this and exits",
        "",
        "Order: flag, environment, TOML, default. In the environment: "
        f"PDQ_{first.upper()}, or PDQ_{role.upper()}__{first.upper()} for this role only.",
    ]
    return "\n".join(lines)


def config_text(settings: list[Setting], values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """TOML with the origin of each value as a comment; loading it gives the same values."""
    lines: list[str] = []
    for component, group in itertools.groupby(settings, key=lambda s: s.component):
        lines.append(f"# {component}")
        lines += [f"{s.name} = {_toml(values[s.name])}  # {origins[s.name]}" for s in group]
        lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and not isinstance(value, Arguments):
        return ",".join(map(_shown, value)) or "empty"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # a TOML basic string
    return repr(value)
