"""The engine's end of the socket to its worker."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from engine.base import EngineStats, StepOutputs
from engine.embedded.pipe import EnginePipe, ParentGone

NEWS = StepOutputs(
    outputs=(),
    released=(),
    stats=EngineStats(step=1, total_blocks=1, free_blocks=1, running=0, waiting=0, pinned=0),
)


@pytest.fixture
def ends() -> Iterator[tuple[EnginePipe, socket.socket]]:
    mine, theirs = socket.socketpair()
    mine.setblocking(False)
    pipe = EnginePipe(mine)
    yield pipe, theirs
    theirs.close()
    pipe.close()


def test_a_worker_that_ends_is_gone(ends: tuple[EnginePipe, socket.socket]) -> None:
    pipe, worker = ends
    worker.close()

    with pytest.raises(ParentGone):
        pipe.receive(1.0)


def test_so_is_one_that_was_killed_before_it_had_read_everything(ends: tuple[EnginePipe, socket.socket]) -> None:
    pipe, worker = ends
    pipe.send(NEWS)
    worker.close()

    with pytest.raises(ParentGone):
        pipe.receive(1.0)
