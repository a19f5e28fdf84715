"""Errors of redis-py -> QueueUnavailable with a sentence that says what to do. None of them gets past this folder."""

from __future__ import annotations

from typing import Final

from redis import exceptions

from broker.errors import QueueMisconfigured, QueueUnavailable

# First word of an error reply -> what it means. Debian's Redis 7.0, Valkey 9 and fakeredis agree on these words.
_ADVICE: Final = {
    "OOM": "Redis is full; raise maxmemory or let the queue drain",
    "READONLY": "this Redis became a replica; looking for the master again",
    "LOADING": "Redis is loading its data; it will answer soon",
    "BUSY": "Redis is busy with a script; if it stays so, run SCRIPT KILL",
    "MISCONF": "Redis can't write its files to disk; free disk space or fix its permissions",
    "MASTERDOWN": "this replica lost its master; check the replication",
    "NOREPLICAS": "too few replicas are connected; start them or lower min-replicas-to-write",
    "CLUSTERDOWN": "the Redis cluster is down; check its slots",
    "CROSSSLOT": "keys of one call are in different cluster slots",
    "MOVED": "this is a Redis cluster; point --redis at the node that owns the model's slot",
    "NOPERM": "this Redis user may not run the command; extend its ACL",
}
# After these the connection must not be used again: a new one may find the right server.
_STALE: Final = frozenset({"READONLY", "LOADING", "MASTERDOWN", "UNBLOCKED", "MOVED", "CLUSTERDOWN"})
_NAMED: Final = {
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.NoPermissionError: "NOPERM",
}


def code_of(error: Exception) -> str:
    """The first word of an error reply, also where redis-py made it a class or a script's error wraps it."""
    for cls, code in _NAMED.items():
        if isinstance(error, cls):
            return code
    words = str(error).replace("-", " ").split()
    for word in words[:1]:
        if word.isupper():
            return word
    return next((word for word in words if word in _ADVICE or word == "NOGROUP"), "")


def is_stale(error: Exception) -> bool:
    """The connection leads to the wrong server, or to none."""
    return not isinstance(error, exceptions.ResponseError) or code_of(error) in _STALE


def unavailable(error: Exception, where: str) -> QueueUnavailable:
    """What to raise instead of `error`. `where` is a host and port, never a URL (it may hold a password)."""
    if isinstance(error, QueueUnavailable):
        return error
    if isinstance(error, exceptions.AuthenticationError) or str(error).startswith(("NOAUTH", "WRONGPASS")):
        return QueueMisconfigured(f"Redis at {where} refuses the login ({error}); put user and password into --redis")
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return QueueUnavailable(f"Redis at {where} did not answer in time; is it overloaded, stopped or unreachable?")
    advice = _ADVICE.get(code_of(error))
    if advice is not None:
        return QueueUnavailable(f"Redis at {where} refused: {advice} ({error})")
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return QueueUnavailable(f"Redis at {where} can't be reached; is it running? ({error})")
    return QueueUnavailable(f"Redis at {where} answered with an error: {error}")
