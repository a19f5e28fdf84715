"""Which exceptions of a start say that a configuration, or the machine, can't do: anything else is a bug."""

from __future__ import annotations

import errno
from typing import Final

REFUSALS: Final = (ValueError, NotImplementedError, ImportError)
"""What vLLM and the connector raise on purpose."""
_OF_THE_MACHINE: Final = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES, errno.ENOMEM, errno.ENOSPC}
"""A port or memory that can't be had."""


def is_refusal(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _OF_THE_MACHINE
    is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    return is_out_of_memory or isinstance(error, REFUSALS)
