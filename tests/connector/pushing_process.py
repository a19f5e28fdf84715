"""A P in a process of its own, to be stopped and killed while it pushes. Prints its source as JSON, lives until stdin
ends. Computes and pushes "r1" as soon as a line comes in, its blocks slowly enough to be caught in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from dataclasses import replace

from connector.mooncake import MooncakeTransport
from connector.throttled_transport import ThrottledTransport
from tests.connector.worlds import PATIENT, World

NUM_BLOCKS = 64
BLOCK_BYTES = 4 * 2**20
NUM_LAYERS = 4
SETTINGS = PATIENT


def main() -> None:
    gbps = float(sys.argv[1])
    transport = ThrottledTransport(MooncakeTransport(), gbps=gbps) if gbps else MooncakeTransport()
    world = World(
        "p",
        transport,
        role="producer",
        settings=replace(SETTINGS, kv_batch_bytes=16 * 2**20),
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_BYTES,
        num_layers=NUM_LAYERS,
    )
    print("SOURCE " + json.dumps(dataclasses.asdict(world.source)), flush=True)
    sys.stdin.readline()
    ids = list(range(NUM_BLOCKS))
    request = world.begin_push("r1", NUM_BLOCKS * 16)
    for end in range(4, NUM_BLOCKS + 4, 4):
        world.compute(request, ids, end * 16, [bytes([block_id + 1]) * BLOCK_BYTES for block_id in ids[:end]])
        threading.Event().wait(0.01)
    world.finish_push(request, ids)
    print("COMPUTED", flush=True)
    world.until(lambda: bool(world.sent), limit_s=60)
    print("SENT", flush=True)
    sys.stdin.read()
    world.close()


if __name__ == "__main__":
    main()
