"""Names of processes: new at each start, so that a restarted worker is never taken for its former self."""

from __future__ import annotations

import os
import re
import secrets
import socket


def worker_id(role: str) -> str:
    """`<role>-<host>-<pid>-<random>`, in letters, digits, `.`, `_` and `-` only."""
    return f"{role}-{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"


def host_name() -> str:
    """This machine's name as it stands in ids: letters, digits, `.` and `_` only."""
    return re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname().split(".")[0]) or "host"
