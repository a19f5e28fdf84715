"""Models for the tests: tiny random ones, made in milliseconds, and the demo model through the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torch.tiny import save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """On a busy machine the threads of one product wait for each other far longer than they compute."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct from the default cache, fetched (93 MB) and converted on first use."""
    from engine.models.__main__ import default_cache_dir
    from engine.models.store import prepare_model

    return prepare_model("smollm2-135m", default_cache_dir())


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_runner() -> Iterator:
    """Builds runners with memory for 64 blocks of 4 tokens and closes them."""
    from engine.embedded.torch_runner import TorchRunner

    made = []

    def build(folder: Path, *, num_blocks: int = 64, block_size: int = 4, **options: object) -> TorchRunner:
        runner = TorchRunner(folder, **options)
        made.append(runner)
        runner.regions = runner.allocate(num_blocks, block_size)
        return runner

    yield build
    for runner in made:
        runner.close()
