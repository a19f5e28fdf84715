"""`python -m tests.chaos --seconds 300 --seed 1 --mode push`: a chaos run; exit code 1 when a law was broken."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path

from tests.chaos import plan, report
from tests.chaos.plan import Kind
from tests.chaos.run import redis_for_chaos, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the load")
    parser.add_argument("--seed", type=int, default=1, help="of the plan of strikes and of what the clients ask")
    parser.add_argument("--mode", choices=("push", "pull"), default="push")
    parser.add_argument("--kinds", default="", help=f"only these, with commas; of: {', '.join(Kind)}")
    parser.add_argument("--folder", type=Path, default=Path(".pdq/chaos"), help="a folder per run is made in it")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    options = parser.parse_args()
    kinds = [Kind(word.strip()) for word in options.kinds.split(",")] if options.kinds else list(Kind)
    planned = plan.strikes(options.seed, options.seconds, kinds)
    if options.plan:
        print("\n".join(map(str, planned)))
        return 0
    folder = options.folder.absolute() / f"{options.mode}-{options.seed}-{options.seconds:g}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    server = redis_for_chaos(folder)
    server.start()
    try:
        done = asyncio.run(
            run(folder, server, seed=options.seed, mode=options.mode, seconds=options.seconds, kinds=kinds)
        )
    finally:
        server.kill()
    text = report.as_text(done)
    (folder / "report.txt").write_text(text + "\n")
    print(text)
    return 0 if done.verdict.is_good else 1


sys.exit(main())
