"""Takes a model from the Hugging Face hub, for hosts that reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.models.errors import ModelError, Progress

_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def fetch_from_hub(name: str, cache_dir: Path, on_progress: Progress) -> Path:
    """The folder of `org/name`, in the hub's own cache layout below `cache_dir`. Raises ModelError.

    Files that are there already are used without network.
    """
    from huggingface_hub import snapshot_download

    on_progress("download", 0, None)
    try:
        folder = Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=_FILES))
    except (OSError, ValueError, RuntimeError) as exc:  # the hub's errors derive from these, its network layer's too
        raise ModelError(
            f"can't get {name} from the Hugging Face hub ({type(exc).__name__}: {exc}). "
            "Download it on a host that reaches the hub and give the folder instead of the name."
        ) from exc
    on_progress("download", 1, 1)
    return folder
