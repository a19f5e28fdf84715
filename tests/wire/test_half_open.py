"""Connections that one end has lost without the other one being told: asked in vain, a link connects anew."""

from __future__ import annotations

import asyncio
import time

import pytest

from broker.errors import PeerUnavailable
from broker.links import NoticeInbox, NoticePeers, NoticeSettings
from broker.messages import Cancel, Probe
from connector.links import SideLinks
from connector.settings import ConnectorSettings
from connector.side_channel import Gone, Renew, codec
from pdq.wire.blocking import BlockingInbox, BlockingLink, Hub
from pdq.wire.types import Pair
from tests.faults.tcp_proxy import TcpProxy

LIMIT_S = 10.0
"""Below the time after which ZeroMQ itself gives up a silent connection."""
PAIR = Pair(gen=1, attempt=1)


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


async def test_a_question_that_nobody_answered_is_the_last_one_into_a_half_open_connection():
    inbox = NoticeInbox(NoticeSettings(), worker_id="decode-1")
    await inbox.start(lambda notice, reply: None)
    peers = NoticePeers(NoticeSettings(), worker_id="prefill-1")
    with TcpProxy(("127.0.0.1", port_of(inbox.endpoint))) as proxy:
        assert await peers.probe(proxy.endpoint, timeout_s=LIMIT_S, tries=1) == "decode-1"

        proxy.half_open()
        started_at = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnavailable):
            await peers.request(proxy.endpoint, Probe(sender="prefill-1"), timeout_s=0.1, tries=2)
        answer = await peers.probe(proxy.endpoint, timeout_s=0.5, tries=19)

        assert answer == "decode-1"
        assert asyncio.get_running_loop().time() - started_at < LIMIT_S
        await peers.close()
    await inbox.close()


async def test_a_link_on_which_something_was_heard_meanwhile_is_left_alone():
    inbox = NoticeInbox(NoticeSettings(), worker_id="decode-1")
    await inbox.start(lambda notice, reply: None)  # answers probes only
    peers = NoticePeers(NoticeSettings(), worker_id="prefill-1")
    with TcpProxy(("127.0.0.1", port_of(inbox.endpoint))) as proxy:
        in_vain = asyncio.create_task(
            peers.request(proxy.endpoint, Cancel(request_id="r", pair=PAIR, reason="test"), timeout_s=0.3, tries=2)
        )
        while not in_vain.done():
            await peers.probe(proxy.endpoint, timeout_s=LIMIT_S, tries=1)

        with pytest.raises(PeerUnavailable):
            await in_vain
        assert proxy.num_connections == 1
        await peers.close()
    await inbox.close()


def test_side_channel_messages_are_repeated_over_another_connection():
    settings = ConnectorSettings(kv_answer_s=0.1)
    inbox = BlockingInbox(codec(), host="127.0.0.1")
    hub = Hub()
    hub.add(inbox)
    links = SideLinks(hub, settings, identity="d")

    def ask(endpoint: str, limit_s: float) -> float:
        """Repeats until answered; how long it took."""
        started_at = time.monotonic()
        while (now := time.monotonic()) - started_at < limit_s:
            links.send(endpoint, Renew(epoch="p", transfer_id="r", pair=PAIR, consumer="d"), now)
            ends_at = now + settings.kv_answer_s
            while (left_s := ends_at - time.monotonic()) > 0:
                for socket in hub.wait(int(left_s * 1000) + 1):
                    if isinstance(socket, BlockingInbox):
                        for message, reply in socket.receive():
                            reply(Gone(epoch="p", transfer_id=message.transfer_id, pair=message.pair, reason="test"))
                    elif isinstance(socket, BlockingLink) and links.receive(socket):
                        return time.monotonic() - started_at
        raise AssertionError(f"no answer within {limit_s} s")

    with TcpProxy(("127.0.0.1", port_of(inbox.endpoint))) as proxy:
        ask(proxy.endpoint, LIMIT_S)
        connections = proxy.num_connections

        proxy.half_open()
        ask(proxy.endpoint, LIMIT_S)

        assert proxy.num_connections > connections
        links.close()
    inbox.close()
    hub.close()
