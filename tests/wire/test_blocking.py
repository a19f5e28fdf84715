from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from pdq.wire.blocking import BlockingInbox, BlockingLink, Hub
from pdq.wire.codec import Codec

LIMIT_MS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    number: int


CODEC: Codec[Ping] = Codec(Ping)


@pytest.fixture(params=["tcp", "ipc"])
def inbox(request, tmp_path):
    host = "127.0.0.1" if request.param == "tcp" else f"ipc://{tmp_path}/inbox"
    inbox = BlockingInbox(CODEC, host=host)
    yield inbox
    inbox.close()


@pytest.fixture
def link(inbox):
    link = BlockingLink(CODEC, inbox.endpoint, identity="a")
    yield link
    link.close()


def test_a_message_is_answered_with_its_ref(inbox, link):
    assert link.send(Ping(number=1), ref=9)

    ((message, reply),) = inbox.poll(LIMIT_MS)
    assert message == Ping(number=1)
    assert reply(Ping(number=2))
    assert link.poll(LIMIT_MS) == [(Ping(number=2), 9)]
    assert link.receive() == []


def test_a_reply_can_be_used_later_and_again(inbox, link):
    link.send(Ping(number=1), ref=9)
    ((_, reply),) = inbox.poll(LIMIT_MS)

    assert reply(Ping(number=2))
    assert reply(Ping(number=3))

    received = link.poll(LIMIT_MS)
    while len(received) < 2:
        received += link.poll(LIMIT_MS)
    assert received == [(Ping(number=2), 9), (Ping(number=3), 9)]


def test_a_request_waits_for_the_answer_with_its_ref(inbox, link):
    def answer():
        ((message, reply),) = inbox.poll(LIMIT_MS)
        reply(Ping(number=message.number + 1))

    thread = threading.Thread(target=answer)
    thread.start()

    assert link.request(Ping(number=1), ref=3, timeout_s=LIMIT_MS / 1000, tries=1) == Ping(number=2)
    thread.join()


def test_a_request_without_answer_repeats_and_ends_in_a_timeout(inbox, link):
    with pytest.raises(TimeoutError, match="Ping to"):
        link.request(Ping(number=1), ref=3, timeout_s=0.05, tries=3)

    received = inbox.poll(LIMIT_MS)
    while len(received) < 3 and (more := inbox.poll(LIMIT_MS)):
        received += more
    assert [message for message, _ in received] == [Ping(number=1)] * 3


def test_a_hub_names_the_sockets_that_have_something(inbox, link):
    hub = Hub()
    other = BlockingInbox(CODEC, host="127.0.0.1")
    for member in (inbox, other, link):
        hub.add(member)

    assert hub.wait(0) == []
    link.send(Ping(number=1))
    assert hub.wait(LIMIT_MS) == [inbox]
    ((_, reply),) = inbox.receive()
    reply(Ping(number=2))
    assert hub.wait(LIMIT_MS) == [link]
    link.receive()
    assert hub.wait(0) == []

    hub.remove(other)
    other.close()
    assert hub.wait(0) == []
    hub.close()


def test_a_wake_from_another_thread_ends_the_wait():
    hub = Hub()
    is_waiting = threading.Event()

    def wake():
        is_waiting.wait()
        hub.wake()

    thread = threading.Thread(target=wake)
    thread.start()
    started_at = time.monotonic()
    is_waiting.set()

    assert hub.wait(LIMIT_MS) == []
    assert time.monotonic() - started_at < LIMIT_MS / 1000
    thread.join()
    hub.close()


def test_many_wakes_before_a_wait_end_one_wait():
    hub = Hub()
    for _ in range(100_000):
        hub.wake()

    assert hub.wait(LIMIT_MS) == []
    started_at = time.monotonic()
    assert hub.wait(20) == []
    assert time.monotonic() - started_at >= 0.019
    hub.close()
    hub.wake()


def test_a_full_queue_refuses_instead_of_blocking():
    inbox = BlockingInbox(CODEC, host="127.0.0.1", hwm=5)
    link = BlockingLink(CODEC, inbox.endpoint, identity="a", hwm=5)

    sent = [link.send(Ping(number=number)) for number in range(100_000)]

    assert not all(sent)
    assert link.num_dropped == sent.count(False)
    link.close()
    inbox.close()


def test_an_endpoint_that_is_no_address_is_an_error():
    with pytest.raises(OSError, match="nonsense"):
        BlockingLink(CODEC, "nonsense", identity="a")
