"""Fencing a transport until it works or the time is over: what the reading and the writing thread do alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from connector.transport import Transport, TransportError

log = structlog.get_logger(__name__)

_RETRY_S: Final = 0.5


def fence(
    transport: Transport,
    *,
    limit_s: float,
    changed: threading.Condition,
    is_closing: Callable[[], bool],
    peer: str | None = None,
) -> bool:
    """True: nothing that was begun before moves bytes any more. False: it may, for good.

    Never raises: the thread must live to say that the blocks are not safe. `changed` is notified when `is_closing`
    turns true. `peer`: of the call that failed, for the log.
    """
    left_s = limit_s
    while True:
        try:
            transport.fence()
            return True
        except TransportError as exc:
            log.error("kv_fence_failed", peer=peer, cause=str(exc))
        except Exception:  # see above
            log.exception("kv_fence_crashed", peer=peer)
        with changed:
            if is_closing() or left_s <= 0:
                return False
            changed.wait(_RETRY_S)
        left_s -= _RETRY_S
