"""A stand-in for a worker, also for its engine process: FAKE_WORKER says how it behaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROLE = globals().get("ROLE", "prefill_worker")  # the decode worker's stand-in sets it


def note_stop(*_: object) -> None:
    with Path("stops.txt").open("a") as file:
        file.write(f"{ROLE}\n")
    os._exit(0)


behaviour = os.environ.get("FAKE_WORKER", "")
if behaviour == "bad settings":
    print("can't start: --model is missing", file=sys.stderr)
    raise SystemExit(2)
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, note_stop)
subprocess.Popen(["sleep", "1000"])  # an engine that its worker does not look after
print(sorted(name for name in os.environ if name.startswith("PDQ_")), flush=True)
while True:
    signal.pause()
