"""A P in a process of its own, to be stopped and killed. Prints its ticket as JSON, then lives until stdin ends."""

from __future__ import annotations

import json
import sys

from connector.mooncake import MooncakeTransport
from tests.connector.worlds import PATIENT, World

NUM_BLOCKS = 64
BLOCK_BYTES = 4 * 2**20


def main() -> None:
    world = World(
        "p",
        MooncakeTransport(),
        role="producer",
        settings=PATIENT,
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
    )
    for block_id in range(NUM_BLOCKS):
        world.memory.fill(block_id, bytes([block_id + 1]) * BLOCK_BYTES)
    _, params = world.prefill("r1", list(range(NUM_BLOCKS)), num_tokens=NUM_BLOCKS * 16)
    print("TICKET " + json.dumps(params), flush=True)
    sys.stdin.read()
    world.close()


if __name__ == "__main__":
    main()
