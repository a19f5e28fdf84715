"""Fences a Mooncake transport some twenty times. Exit code 1: it listened on a port that it had given up before."""

from __future__ import annotations

import sys

from connector.mooncake import MooncakeTransport
from connector.mooncake_exit import listening_ports


def main() -> int:
    transport = MooncakeTransport()
    transport.start("127.0.0.1")
    gone: set[int] = set()
    for _ in range(25):
        ports = listening_ports()
        if ports & gone:
            return 1
        transport.fence()
        gone |= ports
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
