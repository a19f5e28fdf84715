"""Layers are counted in a file that two processes map."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector.layer_count import LayerCount


def test_what_one_counts_the_other_reads(tmp_path: Path):
    path = tmp_path / "layers"
    LayerCount.create(path)
    counting, reading = LayerCount(path), LayerCount(path)

    for _ in range(3):
        counting.add()

    assert reading.read() == 3


def test_who_opens_it_later_counts_on(tmp_path: Path):
    path = tmp_path / "layers"
    LayerCount.create(path)
    LayerCount(path).add()

    LayerCount(path).add()

    assert LayerCount(path).read() == 2


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content):
    path = tmp_path / "layers"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises((OSError, ValueError)):
        LayerCount(path)
