"""Start-up checks of the connector: what would fail at the first transfer. Each problem says what to change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib import metadata
from typing import Final

from connector.settings import ConnectorSettings
from connector.transport import Transport, TransportError

_PROBE_BYTES = 4096
_MOONCAKE_PACKAGES: Final = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
)


def problems(settings: ConnectorSettings) -> list[str]:
    """Of settings that can't work together; empty when all is well."""
    found = []
    if settings.side_channel_host.strip("[]") in ("", "*", "0.0.0.0", "::"):
        found.append(
            f"side_channel_host is {settings.side_channel_host!r}, which no peer can connect to:"
            " set it to this host's address"
        )
    if settings.kv_answer_s * settings.kv_answer_tries >= settings.kv_lease_s:
        found.append(
            f"kv_answer_s x kv_answer_tries = {settings.kv_answer_s * settings.kv_answer_tries:g} s must be below"
            f" kv_lease_s = {settings.kv_lease_s:g} s: a silent peer has to be given up before its lease ends"
        )
    if settings.kv_wait_s <= settings.kv_answer_s * settings.kv_answer_tries:
        found.append(f"kv_wait_s = {settings.kv_wait_s:g} s must be above kv_answer_s x kv_answer_tries")
    if settings.kv_push_wait_s < settings.kv_wait_s:
        found.append(f"kv_push_wait_s = {settings.kv_push_wait_s:g} s must be at least kv_wait_s")
    if not 1 <= settings.kv_max_descriptors <= 512:
        found.append(f"kv_max_descriptors is {settings.kv_max_descriptors}, allowed are 1 to 512")
    return found


def installation_problems(is_installed: Callable[[str], bool] | None = None) -> list[str]:
    """Of the packages around us; empty when all is well. Mooncake's packages overwrite each other's files silently."""
    is_installed = is_installed or _is_installed
    found = [name for name in _MOONCAKE_PACKAGES if is_installed(name)]
    if len(found) < 2:
        return []
    return [
        f"{' and '.join(found)} are installed together, but each brings the module `mooncake`, so that it is a mixture"
        f" of both: `pip uninstall -y {' '.join(found)}`, then install pdq with one of the extras local (CPU), cuda or"
        " ascend"
    ]


def transport_problems(transport: Transport, host: str) -> list[str]:
    """Starts and closes the transport: it must open, register memory and read it back. Give it one made for this."""
    source = ctypes.create_string_buffer(b"\xa5" * _PROBE_BYTES, _PROBE_BYTES)
    target = ctypes.create_string_buffer(_PROBE_BYTES)
    try:
        address = transport.start(host)
        transport.register(ctypes.addressof(source), _PROBE_BYTES)
        transport.register(ctypes.addressof(target), _PROBE_BYTES)
        transport.read(address, [ctypes.addressof(target)], [ctypes.addressof(source)], [_PROBE_BYTES])
    except TransportError as exc:
        return [f"the KV transport does not work on side_channel_host {host}: {exc}"]
    finally:
        transport.close()
    return [] if source.raw == target.raw else [f"the KV transport on {host} reads back other bytes than were there"]


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
