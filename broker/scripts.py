"""The Lua scripts by name: text and SHA1. A file's header says its keys, arguments and answer.

`common.lua` is in front of each. Run by EVALSHA; a server that does not know the SHA (restart, SCRIPT FLUSH) is sent
the text by `redis_calls.py`.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    text: str
    sha: str


@functools.cache
def script(name: str) -> Script:
    """Reads `lua/<name>.lua` once per process. Raises FileNotFoundError."""
    text = _read("common") + "\n" + _read(name)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
