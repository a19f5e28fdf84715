"""Addresses of ZeroMQ inboxes: what to bind, and what to tell others. A wildcard is never told."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

_WILDCARDS: Final = ("", "*", "0.0.0.0", "::")


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def bind_address(host: str) -> str:
    """The IP address to bind for a host name or address; ZeroMQ itself binds no names.

    Raises OSError when the name has no address.
    """
    bare = host.strip("[]")
    if bare in ("", "*"):
        return "0.0.0.0"
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as exc:
        raise OSError(f"host {host!r} has no address: {exc.strerror}") from exc


def advertised_host(host: str, advertise_host: str | None) -> str:
    """The host that others connect to. Raises ValueError when that would be a wildcard."""
    told = host if advertise_host is None else advertise_host
    if told.strip("[]") in _WILDCARDS:
        raise ValueError(f"{told!r} can't be connected to: give the address that peers use (advertise host)")
    return told


def needs_ipv6(endpoint: str) -> bool:
    """True for IPv6 addresses and for host names, which may have IPv6 addresses only."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return True
