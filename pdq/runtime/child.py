"""`python -m pdq.runtime.child PARENT_PID -- COMMAND ...`: becomes COMMAND, which dies with PARENT_PID.

A wrapper instead of subprocess's preexec_fn, which is not safe in a process with threads.
"""

from __future__ import annotations

import os
import sys

from pdq.runtime.signals import die_with_parent


def main(argv: list[str]) -> int:
    """Doesn't return unless COMMAND can't be run (127)."""
    parent_pid, dashes, *command = argv
    if dashes != "--" or not command:
        print(__doc__, file=sys.stderr)
        return 2
    die_with_parent(int(parent_pid))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"can't run {command[0]}: {error}", file=sys.stderr)
        return 127


def command_of_child(command: list[str]) -> list[str]:
    """`command`, wrapped so that it dies with the calling process (whose main thread must start it)."""
    return [sys.executable, "-m", "pdq.runtime.child", str(os.getpid()), "--", *command]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
