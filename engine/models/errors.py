"""What goes wrong while a model is fetched, and how progress is told."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called with (step, done, total). `total` is None while unknown; a step has ended when done == total."""


class ModelError(Exception):
    """The model can't be had. The text says what to change."""


def no_progress(step: str, done: int, total: int | None) -> None:
    """For callers that show nothing."""
