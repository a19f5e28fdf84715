"""`python -m tests.chaos --seconds 300 --seed 1,2,3 --mode push,pull`: chaos runs, one after the other.

Each prints its report; several end with tables of all of them. Exit code 1 when a law was broken in any.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path
from typing import get_args

from tests.chaos import plan, report
from tests.chaos.plan import Kind
from tests.chaos.run import Mode, Report, redis_for_chaos, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the load")
    parser.add_argument(
        "--seed", type=_seeds, default="1", help="of the plan of strikes and of what the clients ask; or 1,2,3"
    )
    parser.add_argument("--mode", type=_modes, default="push", help="push, pull, or push,pull")
    parser.add_argument("--kinds", default="", help=f"only these, with commas; of: {', '.join(Kind)}")
    parser.add_argument("--folder", type=Path, default=Path(".pdq/chaos"), help="a folder per run is made in it")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    options = parser.parse_args()
    kinds = [Kind(word.strip()) for word in options.kinds.split(",")] if options.kinds else list(Kind)
    if options.plan:
        print("\n".join(str(strike) for seed in options.seed for strike in plan.strikes(seed, options.seconds, kinds)))
        return 0
    done = [
        once(options.folder.absolute(), seed=seed, mode=mode, seconds=options.seconds, kinds=kinds)
        for mode in options.mode
        for seed in options.seed
    ]
    if len(done) > 1:
        print(report.as_tables(done))
    return 0 if all(one.verdict.is_good for one in done) else 1


def _seeds(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _modes(text: str) -> list[str]:
    words = text.split(",")
    if not set(words) <= set(get_args(Mode)):
        raise ValueError
    return words


def once(folder: Path, *, seed: int, mode: Mode, seconds: float, kinds: list[Kind]) -> Report:
    """One run, with its files in a folder of its own in `folder`."""
    own = folder / f"{mode}-{seed}-{seconds:g}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    server = redis_for_chaos(own)
    server.start()
    try:
        done = asyncio.run(run(own, server, seed=seed, mode=mode, seconds=seconds, kinds=kinds))
    finally:
        server.kill()
    text = report.as_text(done)
    (own / "report.txt").write_text(text + "\n")
    print(text, flush=True)
    return done


sys.exit(main())
