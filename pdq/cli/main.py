"""`pdq COMMAND ...`: each command is a module with `main(argv) -> exit code`, imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final, cast

from pdq.runtime.process import version

COMMANDS: Final = {
    "up": "everything on this machine: Redis-compatible server, gateway, prefill and decode workers",
    "demo": "starts everything, asks one question, shows the answer and what it took, stops everything",
    "status": "workers, queue and requests in flight",
    "top": "the same, live; q leaves",
    "scale": "more or fewer workers of a running `pdq up`: pdq scale prefill=3 decode=2",
    "drain": "a worker finishes what it has and ends: pdq drain WORKER_ID",
    "dead": "jobs that the queue gave up: pdq dead list | show ID | drop ID",
    "model": "fetches and converts a model: pdq model fetch NAME",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 after a fault, 2 after a bad command or setting."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"pdq {version()}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"pdq: unknown command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"pdq.cli.{arguments[0]}")
    command = cast(Callable[[Sequence[str]], int], module.main)
    return command(arguments[1:])


def _usage() -> str:
    lines = ["usage: pdq COMMAND [--setting VALUE ...]", "", "commands (`pdq COMMAND --help` says more):"]
    return "\n".join([*lines, *(f"  {name:<8}{about}" for name, about in COMMANDS.items())])


if __name__ == "__main__":
    raise SystemExit(main())
