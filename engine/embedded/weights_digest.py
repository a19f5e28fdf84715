"""A short name for a model's weights, so that P and D can tell whether they serve the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 16 * 1024


def weights_digest(folder: Path) -> str:
    """16 hex digits over config.json and, per weights file, its size and 1 MiB of samples spread over it.

    Reads little, so it costs milliseconds at each start; two fine-tunes differ in every tensor and so in the samples.
    Empty when the folder can't be read.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                for index in range(_SAMPLES):
                    file.seek(size * index // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return ""
    return digest.hexdigest()[:16]
