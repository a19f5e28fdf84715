from __future__ import annotations

import asyncio
import select
import time
from dataclasses import dataclass

import pytest
import uvloop
import zmq

from pdq.wire.codec import Codec
from pdq.wire.sockets import Inbox, PeerLink, Peers, Reply

LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    text: str


CODEC: Codec[Ping | Pong] = Codec(Ping | Pong)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    def run_in_loop(coroutine):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(coroutine, LIMIT_S))

    return run_in_loop


def echo(message: Ping | Pong, reply: Reply[Ping | Pong]) -> None:
    reply(Pong(text=message.text))


async def started(handler=echo, **options) -> Inbox[Ping | Pong]:
    inbox = Inbox(CODEC, host="127.0.0.1", **options)
    await inbox.start(handler)
    return inbox


def test_a_request_gets_its_answer(run):
    async def scenario():
        inbox = await started()
        link = PeerLink(CODEC, inbox.endpoint, identity="a")
        answers = await asyncio.gather(
            *(link.request(Ping(text=str(i)), timeout_s=LIMIT_S, tries=1) for i in range(500))
        )
        await link.close()
        await inbox.close()
        return answers

    assert run(scenario()) == [Pong(text=str(i)) for i in range(500)]


def test_one_way_messages_arrive_in_order_and_unsolicited_ones_come_back(run):
    async def scenario():
        seen, back, done = [], [], asyncio.Event()

        def collect(message, reply):
            seen.append(int(message.text))
            reply(Pong(text=message.text))

        def returned(message):
            back.append(int(message.text))
            if len(back) == 800:
                done.set()

        inbox = await started(collect)
        link = PeerLink(CODEC, inbox.endpoint, identity="a", on_message=returned)
        assert all(link.send(Ping(text=str(i))) for i in range(800))
        await done.wait()
        await link.close()
        await inbox.close()
        return seen, back

    assert run(scenario()) == (list(range(800)), list(range(800)))


def test_a_lost_answer_is_asked_for_again_with_the_same_ref(run):
    async def scenario():
        refs = []

        def second_time(message, reply):
            refs.append(reply._ref)
            if len(refs) == 2:
                reply(Pong(text="late"))

        inbox = await started(second_time)
        link = PeerLink(CODEC, inbox.endpoint, identity="a")
        answer = await link.request(Ping(text="x"), timeout_s=0.05, tries=500)
        await link.close()
        await inbox.close()
        return answer, refs[:2]

    assert run(scenario()) == (Pong(text="late"), [1, 1])


def test_a_silent_peer_ends_in_a_timeout_and_a_late_answer_is_dropped(run):
    async def scenario():
        replies: asyncio.Queue[Reply[Ping | Pong]] = asyncio.Queue()
        late = []
        answering = asyncio.Event()
        inbox = await started(
            lambda message, reply: echo(message, reply) if answering.is_set() else replies.put_nowait(reply)
        )
        link = PeerLink(CODEC, inbox.endpoint, identity="a", on_message=late.append)
        with pytest.raises(TimeoutError, match="Ping to tcp://127"):
            await link.request(Ping(text="x"), timeout_s=0.05, tries=2)
        first = await replies.get()  # the connection may not have been there before the question was given up
        first(Pong(text="late"))  # False: the link has connected anew already
        answering.set()
        assert await link.request(Ping(text="y"), timeout_s=LIMIT_S, tries=1) == Pong(text="y")
        assert late == []
        await link.close()
        await inbox.close()

    run(scenario())


def test_an_answer_to_a_vanished_peer_is_false(run):
    async def scenario():
        replies: asyncio.Queue[Reply[Ping | Pong]] = asyncio.Queue()
        inbox = await started(lambda message, reply: replies.put_nowait(reply))
        link = PeerLink(CODEC, inbox.endpoint, identity="a")
        link.send(Ping(text="x"))
        reply = await replies.get()
        await link.close()
        while reply(Pong(text="x")):  # noqa: ASYNC110 - nothing tells when the inbox has seen the connection's end
            await asyncio.sleep(0)
        assert inbox.num_dropped == 1
        await inbox.close()

    run(scenario())


def test_a_failed_answer_does_not_hide_a_message_that_has_just_arrived(run):
    async def scenario():
        received: asyncio.Queue[tuple[str, Reply[Ping | Pong]]] = asyncio.Queue()
        inbox = await started(lambda message, reply: received.put_nowait((message.text, reply)))
        gone, link = (PeerLink(CODEC, inbox.endpoint, identity=name) for name in ("gone", "here"))
        gone.send(Ping(text="gone"))
        _, reply = await received.get()
        await gone.close()
        while reply(Pong(text="x")):  # noqa: ASYNC110 - nothing tells when the inbox has seen the connection's end
            await asyncio.sleep(0)
        link.send(Ping(text="0"))
        assert (await received.get())[0] == "0"

        for number in range(1, 20):
            link.send(Ping(text=str(number)))
            inbox_fd = inbox._router.socket.getsockopt(zmq.FD)
            select.select([inbox_fd], [], [], LIMIT_S)  # it is announced, and the loop has not run yet
            until = time.monotonic() + 0.003
            while time.monotonic() < until:  # ZeroMQ looks at its announcements about once a millisecond
                assert not reply(Pong(text="x"))
            assert (await received.get())[0] == str(number)
        await link.close()
        await inbox.close()

    run(scenario())


def test_sending_never_blocks_when_nobody_reads(run):
    async def scenario():
        inbox = Inbox(CODEC, host="127.0.0.1", hwm=10)  # never started
        link = PeerLink(CODEC, inbox.endpoint, identity="a", hwm=10)
        sent = [link.send(Ping(text="x" * 100_000)) for _ in range(2000)]
        assert not all(sent)
        assert link.num_dropped == sent.count(False)
        await link.close()
        await inbox.close()

    run(scenario())


def test_a_queue_that_was_full_takes_messages_again(run):
    async def scenario():
        count = 0

        def counted(message, reply):
            nonlocal count
            count += 1
            reply(message)

        inbox = Inbox(CODEC, host="127.0.0.1", hwm=10)
        link = PeerLink(CODEC, inbox.endpoint, identity="a", hwm=10)
        sent = 0
        while link.send(Ping(text="x" * 100_000)):
            sent += 1
        await inbox.start(counted)
        assert await link.request(Ping(text="y"), timeout_s=0.1, tries=250) == Ping(text="y")
        assert count > sent
        await link.close()
        await inbox.close()

    run(scenario())


def test_what_does_not_decode_is_counted_and_the_inbox_goes_on(run):
    async def scenario():
        inbox = await started()
        with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
            hostile.connect(inbox.endpoint)
            hostile.send(b"\xc1")
            hostile.send_multipart([b"a", b"b", b"c"])
            hostile.send(CODEC.encode(Ping(text="x")) + b"junk")
            hostile.send(CODEC.encode(Ping(text="x"), ref=7))
            assert await asyncio.to_thread(hostile.poll, int(LIMIT_S * 1000))
            assert CODEC.decode(hostile.recv()) == (Pong(text="x"), 7)
        assert inbox.num_undecodable == 3
        await inbox.close()

    run(scenario())


def test_a_handler_that_raises_does_not_stop_the_inbox(run):
    async def scenario():
        def moody(message, reply):
            if message.text == "bad":
                raise RuntimeError("moody")
            echo(message, reply)

        inbox = await started(moody)
        link = PeerLink(CODEC, inbox.endpoint, identity="a")
        link.send(Ping(text="bad"))
        answer = await link.request(Ping(text="good"), timeout_s=LIMIT_S, tries=1)
        await link.close()
        await inbox.close()
        return answer

    assert run(scenario()) == Pong(text="good")


def test_closing_a_link_ends_its_requests(run):
    async def scenario():
        inbox = await started(lambda message, reply: None)
        link = PeerLink(CODEC, inbox.endpoint, identity="a")
        waiting = asyncio.ensure_future(link.request(Ping(text="x"), timeout_s=LIMIT_S, tries=1))
        await asyncio.sleep(0)
        await link.close()
        with pytest.raises(TimeoutError, match="closed"):
            await waiting
        with pytest.raises(TimeoutError, match="closed"):
            await link.request(Ping(text="x"), timeout_s=LIMIT_S, tries=1)
        await inbox.close()

    run(scenario())


async def test_unused_links_are_closed_and_made_again():
    inbox = await started()
    peers = Peers(CODEC, identity="a", idle_s=0.02)

    assert await peers.request(inbox.endpoint, Ping(text="x"), timeout_s=LIMIT_S, tries=1) == Pong(text="x")
    async with asyncio.timeout(LIMIT_S):
        while len(peers):  # noqa: ASYNC110 - closing an idle link is an event for nobody
            await asyncio.sleep(0.01)
    assert await peers.request(inbox.endpoint, Ping(text="y"), timeout_s=LIMIT_S, tries=1) == Pong(text="y")
    await peers.close()
    await inbox.close()
