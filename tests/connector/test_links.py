"""Links to a peer that answers late: asked over another connection, and heard over the one before. Time is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from connector.links import SideLinks
from connector.settings import ConnectorSettings
from connector.side_channel import Gone, Renew, SideMessage, TransferMessage, codec
from pdq.wire.blocking import BlockingInbox, BlockingLink, Hub
from pdq.wire.nonblocking import Reply
from pdq.wire.types import Pair

SETTINGS = ConnectorSettings(kv_answer_s=0.5, kv_answer_tries=6)
SILENT_S = 1.6
"""Three answers' time and a bit: the next question goes over another link."""
PAIR = Pair(gen=1, attempt=1)
LIMIT_MS = 20_000


@dataclass
class Peer:
    """Two ends of a side channel in one thread: what is asked is kept until it is answered."""

    hub: Hub = field(default_factory=Hub)
    inbox: BlockingInbox[SideMessage] = field(default_factory=lambda: BlockingInbox(codec(), host="127.0.0.1"))
    asked: list[tuple[SideMessage, Reply[SideMessage]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = SideLinks(self.hub, SETTINGS, identity="d")

    def ask(self, name: str, now: float) -> None:
        """Returns when the question has arrived."""
        self.links.send(self.inbox.endpoint, Renew(epoch="p", transfer_id=name, pair=PAIR, consumer="d"), now)
        num_before = len(self.asked)
        while len(self.asked) == num_before:
            received = self.inbox.poll(LIMIT_MS)
            assert received, "the question did not arrive"
            self.asked += received

    def answer(self, index: int) -> bool:
        """False: the link over which it was asked is closed."""
        message, reply = self.asked[index]
        assert isinstance(message, TransferMessage)
        return reply(Gone(epoch="p", transfer_id=message.transfer_id, pair=PAIR, reason="test"))

    def until_lost(self, index: int) -> None:
        """Until the inbox sees that this link is closed."""
        deadline = time.monotonic() + LIMIT_MS / 1000
        while self.answer(index):
            assert time.monotonic() < deadline, "the link is open"
            time.sleep(0.01)

    def heard(self) -> list[str]:
        """Which question the answer is for; waits for one."""
        ready = self.hub.wait(LIMIT_MS)
        answers = [answer for link in ready if isinstance(link, BlockingLink) for answer in self.links.receive(link)]
        return [answer.transfer_id for answer in answers if isinstance(answer, TransferMessage)]

    def link_of(self, index: int) -> bytes:
        """Over which a question came."""
        return self.asked[index][1].peer

    def close(self) -> None:
        self.links.close()
        self.inbox.close()
        self.hub.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def test_an_answer_that_comes_after_the_link_was_replaced_is_heard(peer: Peer):
    peer.ask("first", 0.0)
    peer.ask("second", SILENT_S)
    assert peer.link_of(0) != peer.link_of(1)

    peer.answer(0)

    assert peer.heard() == ["first"]


def test_a_peer_that_always_needs_longer_is_heard_each_time_and_keeps_its_second_link(peer: Peer):
    """Four answers' time for each answer."""
    heard = []
    for number in range(20):
        if number >= 4:
            peer.answer(number - 4)
            heard += peer.heard()
        peer.ask(str(number), number * 0.51)
        peer.links.close_idle(number * 0.51)

    assert heard == [str(number) for number in range(16)]
    assert len({peer.link_of(number) for number in range(20)}) == 2


def test_a_replaced_link_is_closed_when_nobody_waits_for_its_answers_any_more(peer: Peer):
    peer.ask("first", 0.0)
    peer.ask("second", SILENT_S)
    waited_s = SETTINGS.kv_answer_s * SETTINGS.kv_answer_tries

    peer.links.close_idle(SILENT_S + waited_s - 0.1)
    peer.answer(0)
    assert peer.heard() == ["first"]
    peer.links.close_idle(SILENT_S + waited_s)

    peer.until_lost(0)
    peer.answer(1)
    assert peer.heard() == ["second"]
