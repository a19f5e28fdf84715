"""`python -m engine.models fetch NAME [--cache DIR]`: prepares a model and prints its folder on standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.models.errors import ModelError
from engine.models.known import KNOWN_MODELS
from engine.models.store import prepare_model
from pdq.runtime.model import default_model_cache


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with the reason on standard error. Progress goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m engine.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="fetch and convert a model once")
    fetch.add_argument("name", help=f"{', '.join(KNOWN_MODELS)}; a Hugging Face folder; or a hub name org/name")
    fetch.add_argument("--cache", type=Path, default=default_cache_dir(), help="cache folder (%(default)s)")
    arguments = parser.parse_args(argv)
    bars = _bars()
    try:
        folder = prepare_model(arguments.name, arguments.cache, _Shown(bars))
    except ModelError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        bars.stop()
    print(folder)
    return 0


def default_cache_dir() -> Path:
    """For callers that name no cache folder: where `--model NAME` looks by default."""
    return default_model_cache()


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


class _Shown:
    """One bar per step, from the first step of known length on: pip draws its own bar before that."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, step: str, done: int, total: int | None) -> None:
        if total is None:
            return
        if step not in self._tasks:
            self._bars.start()
            self._tasks[step] = self._bars.add_task(step, total=total)
        self._bars.update(self._tasks[step], completed=done, total=total)


if __name__ == "__main__":
    sys.exit(main())
