"""Files that vLLM's processes write and the worker reads: why they failed, and how far they are."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from connector.layer_count import LayerCount
from engine.vllm.child import Failure, read_failures


class SharedFiles:
    """A folder of its own, there from `create` to `remove`; its name is known before."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"pdq-vllm-{secrets.token_hex(8)}"
        self._layer_count: LayerCount | None = None

    def create(self) -> None:
        """Raises OSError."""
        self._folder.mkdir(mode=0o700)
        LayerCount.create(self.layer_count_path)
        self._layer_count = LayerCount(self.layer_count_path)

    @property
    def failures_path(self) -> Path:
        """Exceptions, see `child.FailureFile`."""
        return self._folder / "failures"

    @property
    def layer_count_path(self) -> Path:
        """Computed layers, see `connector.layer_count`."""
        return self._folder / "layers"

    @property
    def num_layers(self) -> int:
        """Computed since the start, as far as a connector sees them."""
        return self._layer_count.read() if self._layer_count is not None else 0

    @property
    def first_failure(self) -> Failure | None:
        """Of the process of vLLM that failed first: the others fail because of it."""
        return next(iter(read_failures(self.failures_path)), None)

    def failure(self, otherwise: str) -> str:
        """What that process said, or `otherwise`."""
        first = self.first_failure
        return first.text if first is not None else otherwise

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
