"""Transport over Mooncake's Transfer Engine (TCP), version range of pyproject's `sim`, `local` and `cuda` extras.

A call that failed may go on moving bytes in the background: `fence` replaces the engine, which ends that (some 10 ms).
Whoever reaches the engine's ports can read and write registered memory: run it in a closed network.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog

from connector.mooncake_exit import hasten_exit, listening_ports
from connector.transport import PendingRead, TransportError

MAX_DESCRIPTORS: Final = 512
"""A call with some 3,000 fails at once while part of it goes on."""
_NO_BATCH: Final = (0, 2**64 - 1)
"""Nothing was submitted: the peer is unknown or takes nothing."""

_MAX_OPENS: Final = 8
_PROBE_TIMEOUT_S: Final = 1.0
"""Own probe: Mooncake's waits a minute for a process that is stopped."""

_SHORTEST_NAP_S: Final = 20e-6
_LONGEST_NAP_S: Final = 500e-6
_NAPS_PER_WAIT: Final = 10
"""A nap is this part of the time waited so far: the end is noticed at most so much late."""
_BYTES_PER_S: Final = 1e9
"""A call may take a second longer for each of so many bytes, as with Mooncake's own limit."""

_DEBIAN_PACKAGES: Final = {
    "libibverbs": "libibverbs1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "librdmacm": "librdmacm1",
    "libnl-": "libnl-3-200 libnl-route-3-200",
}

log = structlog.get_logger(__name__)


class MooncakeTransport:
    """Owned by one thread; every call blocks, asleep: Mooncake's own blocking calls spin on a core until the end.

    128 KiB over loopback take 0.16 ms either way, but 0.1 instead of 0.45 ms of CPU; 64 MiB on two cores, where
    the spinning thread fights with those that move the bytes, take 16 instead of 27 ms.
    """

    def __init__(self, *, timeout_s: int = 5) -> None:
        """Reads and sets MC_* variables, which Mooncake takes from the environment only. Raises TransportError."""
        _prepare_environment(timeout_s)
        self._timeout_s = max(timeout_s, 5)
        self._engine_class = _import_engine()
        self._engine: Any = None
        self._host = ""
        self._port = 0
        self._address = ""
        self._generation = 0
        self._memory: list[tuple[int, int]] = []
        self._ports: set[int] = set()
        """Those that the engine listens on: its handshakes' and its data's."""
        self._retired_ports: set[int] = set()

    @property
    def address(self) -> str:
        return self._address

    @property
    def generation(self) -> int:
        return self._generation

    def start(self, host: str) -> str:
        self._host = host
        self._open()
        return self._address

    def register(self, address: int, num_bytes: int) -> None:
        self._register(address, num_bytes)
        self._memory.append((address, num_bytes))

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self._begin("batch_transfer_async_read", peer, local, remote, lengths).wait()

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        return self._begin("batch_transfer_async_read", peer, local, remote, lengths)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self._begin("batch_transfer_async_write", peer, local, remote, lengths).wait()

    def fence(self) -> None:
        self._destroy()
        self._generation += 1
        self._open()
        for address, num_bytes in self._memory:
            self._register(address, num_bytes)
        log.info("kv_transport_fenced", generation=self._generation, address=self._address)

    def probe(self, peer: str) -> bool:
        host, _, port = peer.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._destroy()

    def _open(self) -> None:
        """Never on a port that was closed by a fence: who still writes there must find nobody."""
        rejected = []
        for _ in range(_MAX_OPENS):
            before = listening_ports()
            self._open_anywhere()
            self._ports = listening_ports() - before
            if not self._ports & self._retired_ports:
                break
            rejected.append((self._engine, self._port))  # kept open meanwhile, so that the next one differs
        for _, port in rejected:
            hasten_exit(self._host, port)
        rejected.clear()

    def _open_anywhere(self) -> None:
        engine = self._engine_class()
        status = engine.initialize(self._host, "P2PHANDSHAKE", "tcp", "")
        if status != 0:
            raise TransportError(f"the Transfer Engine does not start on {self._host}: status {status}")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._engine, self._port = engine, engine.get_rpc_port()
        self._address = f"{host}:{self._port}"

    def _destroy(self) -> None:
        """When it returns the engine's threads have ended and its connections are closed: that is the fence."""
        if self._engine is not None:
            self._retired_ports |= self._ports
            hasten_exit(self._host, self._port)
            self._engine = None

    def _register(self, address: int, num_bytes: int) -> None:
        status = self._engine.register_memory(address, num_bytes)
        if status != 0:
            what = "it overlaps memory registered before" if status == -7 else f"status {status}"
            raise TransportError(f"memory {address:#x}+{num_bytes} can't be registered: {what}")

    def _begin(
        self, method: str, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]
    ) -> _Transfer:
        if len(lengths) > MAX_DESCRIPTORS:
            raise TransportError(f"{len(lengths)} descriptors in one call, at most {MAX_DESCRIPTORS} are safe")
        if self._engine is None:
            raise TransportError("the transport is not open")
        submit = getattr(self._engine, method)
        # One batch each: only of a batch of one can be asked how it stands without waiting for it.
        batches = [submit(peer, [here], [there], [n]) for here, there, n in zip(local, remote, lengths, strict=True)]
        what = f"{method} with {peer}, {len(lengths)} descriptors, {sum(lengths)} bytes"
        if any(batch in _NO_BATCH for batch in batches):
            raise TransportError(f"{what}: not taken")
        return _Transfer(self, batches, what, self._timeout_s + sum(lengths) / _BYTES_PER_S)

    def status_of(self, batch: int, generation: int) -> int:
        """1: ended well, and forgotten; 0: under way; else failed."""
        if generation != self._generation or self._engine is None:
            raise TransportError("the transport was replaced meanwhile")
        status: int = self._engine.transfer_check_status(batch)
        return status


class _Transfer:
    """One call under way."""

    def __init__(self, transport: MooncakeTransport, batches: list[int], what: str, timeout_s: float) -> None:
        self._transport = transport
        self._generation = transport.generation
        self._batches = batches
        self._what = what
        self._timeout_s = timeout_s
        self._began = time.monotonic()

    def is_done(self) -> bool:
        while self._batches:
            status = self._transport.status_of(self._batches[-1], self._generation)
            if status == 1:
                self._batches.pop()
                continue
            if status != 0:
                raise TransportError(f"{self._what}: status {status}")
            if time.monotonic() - self._began > self._timeout_s:
                raise TransportError(f"{self._what}: no end after {self._timeout_s:.1f} s")
            return False
        return True

    def wait(self) -> None:
        while not self.is_done():
            waited_s = time.monotonic() - self._began
            time.sleep(min(max(waited_s / _NAPS_PER_WAIT, _SHORTEST_NAP_S), _LONGEST_NAP_S))


def _prepare_environment(timeout_s: int) -> None:
    environ = os.environ  # noqa: TID251 - Mooncake has no other way to be told
    if environ.get("MC_TCP_PROTO") == "1":
        raise TransportError(
            "MC_TCP_PROTO=1 chooses the old framing, which reports writes as done while bytes are still under way:"
            " unset MC_TCP_PROTO"
        )
    environ["MC_FORCE_TCP"] = "1"
    environ["MC_TRANSFER_TIMEOUT"] = str(max(timeout_s, 5))
    for name, value in {
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
        "MC_LOG_LEVEL": "ERROR",
    }.items():
        environ.setdefault(name, value)


def _import_engine() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as exc:
        raise TransportError(explain_import_error(str(exc))) from exc
    return TransferEngine


def explain_import_error(error: str) -> str:
    """What to install for an import that failed."""
    library = re.search(r"(lib[\w.+-]+\.so[.\d]*)", error)
    if library is None:
        return f"Mooncake can't be imported ({error}): pip install 'pdqueue[local]' or 'pdqueue[sim]'"
    name = library.group(1)
    package = next((deb for prefix, deb in _DEBIAN_PACKAGES.items() if name.startswith(prefix)), None)
    hint = f"apt-get install {package}" if package else "install the package that holds it"
    return f"Mooncake needs the system library {name}, which is missing: {hint}"
