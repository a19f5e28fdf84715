from __future__ import annotations

import socket
from dataclasses import dataclass

import pytest

from pdq.wire.codec import Codec
from pdq.wire.sockets import Inbox, PeerLink

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    text: str


CODEC: Codec[Ping] = Codec(Ping)


async def test_a_taken_port_is_an_error_with_its_number():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            Inbox(CODEC, host="127.0.0.1", port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "[::]"])
async def test_a_wildcard_is_never_advertised(host):
    with pytest.raises(ValueError, match="advertise"):
        Inbox(CODEC, host=host)
    inbox = Inbox(CODEC, host=host, advertise_host="localhost")

    assert inbox.endpoint.startswith("tcp://localhost:")
    await inbox.close()


@pytest.mark.parametrize(("host", "prefix"), [("::1", "tcp://[::1]:"), ("localhost", "tcp://localhost:")])
async def test_ipv6_addresses_and_host_names_work(host, prefix):
    inbox = Inbox(CODEC, host=host)
    await inbox.start(lambda message, reply: reply(message))
    link = PeerLink(CODEC, inbox.endpoint, identity="a")

    assert inbox.endpoint.startswith(prefix)
    assert await link.request(Ping(text="x"), timeout_s=LIMIT_S, tries=1) == Ping(text="x")
    await link.close()
    await inbox.close()


async def test_an_endpoint_that_is_no_address_is_an_error():
    with pytest.raises(OSError, match="nonsense"):
        PeerLink(CODEC, "nonsense", identity="a")
