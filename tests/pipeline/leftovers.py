"""What a deployment has beside its data: to be the same before and after, in Redis and in the processes that lived."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.pipeline.harness import Pipeline

FIXED_KEYS: Final = frozenset({"prefill", "ready", "tenants", "wake", "dead", "clock", "config", "workers"})
"""One of each per model, however many workers there were."""


async def lasting_keys(pipeline: Pipeline) -> set[str]:
    """That no TTL will end, but for the fixed ones."""
    names = [raw.decode() async for raw in pipeline.redis.scan_iter()]
    fixed = {pipeline.key(name) for name in FIXED_KEYS} | {"pdq:models"}
    return {name for name in names if name not in fixed and await pipeline.redis.pttl(name) == -1}


async def consumers(pipeline: Pipeline) -> set[str]:
    """Names in the queue's group, the reaper's apart."""
    found = await pipeline.redis.xinfo_consumers(pipeline.key("prefill"), "prefill")
    return {consumer["name"].decode() for consumer in found} - {"-"}


async def consumers_of_the_dead(pipeline: Pipeline) -> set[str]:
    return await consumers(pipeline) - set(await pipeline.workers())


MOST_PER_PEER: Final = 8
"""Connections between two processes, each way: links, and the pool of the KV transport."""
FDS_OF_A_LINK: Final = 3
"""ZeroMQ's own ones, beside the connection: the socket's, and its monitor's two ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """File descriptors, sockets among them, by (process, pid): how many of each kind.

    The kind of a connection between two living processes is `tcp to X` at the one that made it, `tcp from X` at X's.
    Links are made when they are first needed, so that some are new after any run. They are none of a leak: see `leaks`.
    """

    kinds: Mapping[tuple[str, int], Counter[str]]

    def growth(self, after: OpenFiles) -> dict[tuple[str, int], int]:
        """Of the processes that are in both."""
        both = self.kinds.keys() & after.kinds.keys()
        return {process: after.kinds[process].total() - self.kinds[process].total() for process in sorted(both)}

    def leaks(self, after: OpenFiles, *, spare: int) -> list[str]:
        """Processes that were there before and have more than `spare` more of them, beside links to living ones."""
        found = []
        for (name, pid), grown in self.growth(after).items():
            more = after.kinds[name, pid] - self.kinds[name, pid]
            to = sum(min(number, MOST_PER_PEER) for kind, number in more.items() if kind.startswith("tcp to "))
            others = sum(min(number, MOST_PER_PEER) for kind, number in more.items() if kind.startswith("tcp from "))
            if grown - to * (1 + FDS_OF_A_LINK) - others > spare:
                found.append(f"{name} (pid {pid}): {grown:+d} file descriptors, more than before: {dict(more)}")
        return found


def open_files(pipeline: Pipeline) -> OpenFiles:
    """Of every role's process and every engine."""
    connections: dict[tuple[str, int], list[Any]] = {}
    for child in pipeline.deployment.children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(child.pid or 0)
            connections[child.name, process.pid] = process.net_connections("tcp")
            for engine in process.children():
                connections[f"{child.name} engine", engine.pid] = engine.net_connections("tcp")
    names = {one.laddr.port: name for (name, _), found in connections.items() for one in found}
    return OpenFiles(kinds={key: Counter(_kinds(key[1], found, names)) for key, found in connections.items()})


def _kinds(pid: int, connections: Iterable[Any], names: Mapping[int, str]) -> Iterator[str]:
    """`names`: of processes by their ports."""
    tcp = {one.fd: one for one in connections}
    listening = {one.laddr.port for one in tcp.values() if one.status == psutil.CONN_LISTEN}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        one = tcp.get(int(entry.name))
        if one is None:
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                yield entry.readlink().as_posix().partition(":[")[0]
        elif one.raddr and one.raddr.port in names and one.status == psutil.CONN_ESTABLISHED:
            yield f"tcp {'from' if one.laddr.port in listening else 'to'} {names[one.raddr.port]}"
        else:
            yield f"{'stranger' if one.raddr else 'socket'} {one.status.lower()}"
