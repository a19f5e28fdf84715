"""Which model a deployment serves, and how: its folder on this machine, its name for clients and in queue keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pdq.runtime.errors import StartupError

SIM: Final = "sim"
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]")


def default_model_cache() -> Path:
    return Path.home() / ".cache" / "pdq" / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The same for the gateway and all workers of a model."""

    model: str = field(
        default=SIM,
        metadata={"help": "Hugging Face model folder, a name that `pdq model fetch` has fetched, or sim"},
    )
    served_model_name: str = field(
        default="", metadata={"help": "name that clients use, also part of the queue's keys; empty: from --model"}
    )
    model_cache: Path = field(
        default_factory=default_model_cache, metadata={"help": "folder that `pdq model fetch` writes to"}
    )
    mode: Literal["pull", "push", "local"] = field(
        default="pull", metadata={"help": "how KV gets from prefill to decode workers"}
    )

    def __post_init__(self) -> None:
        if any(char in "{}" or char.isspace() for char in self.served_model_name):
            raise ValueError(f"served_model_name {self.served_model_name!r}: no braces and no white space")

    @property
    def is_sim(self) -> bool:
        return self.model == SIM

    @property
    def name(self) -> str:
        """For clients and keys."""
        return self.served_model_name or _NOT_IN_NAMES.sub("-", Path(self.model).name) or SIM

    def folder(self) -> Path:
        """Where config.json and tokenizer.json are. Raises StartupError with the command that gets them."""
        for folder in (Path(self.model).expanduser(), self.model_cache / self.model):
            if (folder / "config.json").is_file():
                return folder.resolve()
        raise StartupError(
            f"--model {self.model}: no such folder with a config.json, here or in {self.model_cache};"
            f" run `pdq model fetch {self.model}` first"
        )
