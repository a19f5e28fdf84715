"""Connections that are lost: what was queued is dropped, requests repeat, and the link is made anew."""

from __future__ import annotations

import asyncio
import errno
import math

from pdq.wire import peer_link
from pdq.wire.sockets import PeerLink
from tests.wire.test_wire_sockets import CODEC, LIMIT_S, Ping, Pong, echo, run, started

__all__ = ["run"]  # the fixture


def test_a_restarted_peer_answers_and_the_reset_is_reported(run):
    async def scenario():
        resets: asyncio.Queue[bool] = asyncio.Queue()
        inbox = await started()
        port = int(inbox.endpoint.rpartition(":")[2])
        link = PeerLink(CODEC, inbox.endpoint, identity="a", on_reset=resets.put_nowait)
        await link.request(Ping(text="1"), timeout_s=LIMIT_S, tries=1)
        await inbox.close()
        assert await resets.get() is False
        assert link.send(Ping(text="to nobody")) is False
        waiting = asyncio.ensure_future(link.request(Ping(text="2"), timeout_s=LIMIT_S, tries=1))
        await asyncio.sleep(0)
        seen = []
        while True:
            try:
                inbox = await started(
                    lambda message, reply: (seen.append(message.text), echo(message, reply)), port=port
                )
                break
            except OSError:  # ZeroMQ closes the old socket in its own thread
                await asyncio.sleep(0)
        assert await resets.get() is True
        assert await waiting == Pong(text="2")
        assert seen == ["2"]
        await link.close()
        await inbox.close()

    run(scenario())


def test_a_link_that_finds_no_descriptor_left_is_made_anew_later(run, monkeypatch):
    async def scenario():
        resets: asyncio.Queue[bool] = asyncio.Queue()
        inbox = await started()
        link = PeerLink(CODEC, inbox.endpoint, identity="a", on_reset=resets.put_nowait)
        await link.request(Ping(text="1"), timeout_s=LIMIT_S, tries=1)

        with monkeypatch.context() as patch:
            patch.setattr(peer_link, "Dealer", no_descriptor)
            link.renew(silent_since=math.inf)
        assert await resets.get() is False
        answer = await link.request(Ping(text="2"), timeout_s=LIMIT_S, tries=1)

        assert await resets.get() is True
        await link.close()
        await inbox.close()
        return answer

    def no_descriptor(*arguments, **options):
        raise OSError(errno.EMFILE, "no socket for messages")

    assert run(scenario()) == Pong(text="2")
