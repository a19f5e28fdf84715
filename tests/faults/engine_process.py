"""The embedded engine's process with points: `python -m tests.faults.engine_process POINTS SOCKET_FD PARENT_PID`."""

from __future__ import annotations

import functools
import sys

from connector.mooncake import MooncakeTransport
from connector.settings import ConnectorSettings
from engine.embedded import process, sim_runner
from engine.embedded.boot import boot
from tests.faults.points import Points
from tests.faults.ports import StoppableRunner, StoppableTransport


def main(argv: list[str]) -> int:
    points = Points.from_argument(argv[0])

    def transport(settings: ConnectorSettings) -> StoppableTransport:
        return StoppableTransport(MooncakeTransport(timeout_s=settings.kv_transport_timeout_s), points)

    StoppableRunner.points = points
    sim_runner.SimRunner = StoppableRunner
    process.boot = functools.partial(boot, new_transport=transport)
    return process.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
