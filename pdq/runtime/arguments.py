"""A setting that holds another program's arguments, as its command line takes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any


class Arguments(tuple[str, ...]):
    """Words, as a shell would split them. In TOML a table does as well: names with _ or -, values of any type."""

    __slots__ = ()

    @classmethod
    def from_text(cls, text: str) -> Arguments:
        """Raises ValueError for quotes that don't end."""
        return cls(shlex.split(text))

    @classmethod
    def from_toml(cls, value: object) -> Arguments:
        """From a text, a list of words or a table. Raises ValueError for anything else."""
        if isinstance(value, str):
            return cls.from_text(value)
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return cls(value)
        if isinstance(value, dict):
            return cls(word for name, item in value.items() for word in _words(name, item))
        raise ValueError(value)

    def __str__(self) -> str:
        return shlex.join(self)

    @property
    def names(self) -> frozenset[str]:
        """Of all `--name`s in it, with _ for -, without a leading `no_` and what follows a dot or an equals sign."""
        flags = (word.partition("=")[0][2:] for word in self if word.startswith("--"))
        return frozenset(flag.partition(".")[0].replace("-", "_").removeprefix("no_") for flag in flags)

    def value_of(self, *flags: str) -> str | None:
        """What follows the last of these flags; None: none is there, or nothing follows."""
        found = None
        for index, word in enumerate(self):
            name, has_value, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            if name in flags:
                found = value if has_value else next(iter(self[index + 1 : index + 2]), None)
        return found


def _words(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, Mapping):
        return [f"--{flag}", json.dumps(value)]
    if isinstance(value, list):
        return [f"--{flag}", *(item if isinstance(item, str) else json.dumps(item) for item in value)]
    return [f"--{flag}", str(value)]
