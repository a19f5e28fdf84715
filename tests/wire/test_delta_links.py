from __future__ import annotations

import asyncio

import pytest

from broker.errors import PeerUnavailable
from broker.links import (
    DeltaReceiver,
    DeltaSender,
    DeltaSettings,
    NoticeInbox,
    NoticePeers,
    NoticeSettings,
)
from broker.messages import Ack, Cancel, Cancelled, Delta, Deltas
from pdq.wire.types import Pair, pack_ids
from tests.faults.tcp_proxy import TcpProxy

LIMIT_S = 40.0
HEARTBEAT_S = 10.0
"""ZeroMQ's own, after which it gives up a connection that is silent."""
PAIR = Pair(gen=1, attempt=1)
QUICK = DeltaSettings(delta_resend_s=0.2, sign_of_life_s=0.1, delta_ack_s=0.01)


def delta(seq: int) -> Delta:
    return Delta(request_id="r", pair=PAIR, seq=seq, token_ids=pack_ids([seq]))


class Gateway:
    """An inbox whose deltas go to a receiver, as a gateway's do."""

    def __init__(self, settings: DeltaSettings = QUICK, *, port: int = 0):
        self.inbox = NoticeInbox(NoticeSettings(inbox_port=port), worker_id="gateway")
        self.receiver = DeltaReceiver(settings)
        self.seqs: list[int] = []
        self.frames: list[int] = []
        self.lists: list[tuple[str, ...]] = []
        self.is_deaf = False
        self.num_ignored = 0
        """Frames that came while it was deaf."""
        self._news = asyncio.Condition()
        self._tasks = set()

    async def start(self):
        await self.inbox.start(self._handle)
        return self

    def _handle(self, notice, reply):
        assert isinstance(notice, Deltas)
        if self.is_deaf:
            self.num_ignored += 1
        else:
            self._take(notice, reply)
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, notice, reply):
        self.frames.append(notice.frame)
        if self.receiver.feed(notice, reply):
            self.seqs.extend(item.seq for item in notice.items)
            self.lists.extend([] if notice.owes is None else [notice.owes])

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def until(self, condition):
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(condition)

    async def close(self):
        await self.inbox.close()
        await self.receiver.close()


def failing(gateway):
    raise AssertionError(f"{gateway} was given up")


async def test_deltas_arrive_once_in_order_and_are_acknowledged():
    gateway = await Gateway().start()
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing)

    for step in range(300):
        sender.push(gateway.inbox.endpoint, step, (delta(step),))

    await gateway.until(lambda: len(gateway.seqs) == 300)
    assert gateway.seqs == list(range(300))
    assert await sender.drained(LIMIT_S)  # not: nothing unacknowledged a moment later, idle frames go on
    await sender.close()
    await gateway.close()


async def test_a_cut_connection_loses_and_doubles_nothing():
    gateway = await Gateway().start()
    repeats = []
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing, on_repeat=lambda: repeats.append(1))

    with proxy_of(gateway) as proxy:
        for step in range(3000):
            sender.push(proxy.endpoint, step, (delta(step),))
            if step % 10 == 0:
                await asyncio.sleep(0)
            if step % 700 == 699:
                before = len(gateway.seqs)
                await gateway.until(lambda before=before: len(gateway.seqs) > before)
                proxy.reset()
        proxy.reset()

        await gateway.until(lambda: len(gateway.seqs) >= 3000)
        assert gateway.seqs == list(range(3000))
        assert proxy.num_connections >= 4
        assert repeats, "what a cut connection had swallowed was sent again, and counted"
        assert await sender.drained(LIMIT_S)
        await sender.close()
    await gateway.close()


async def test_the_last_frame_survives_a_cut_without_a_later_one():
    gateway = await Gateway().start()
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing)
    with proxy_of(gateway) as proxy:
        sender.push(proxy.endpoint, 1, (delta(0),))
        await gateway.until(lambda: gateway.seqs == [0])

        sender.push(proxy.endpoint, 2, (delta(1),))
        proxy.reset()

        await gateway.until(lambda: gateway.seqs == [0, 1])
        await sender.close()
    await gateway.close()


async def test_frames_that_go_into_a_half_open_connection_are_sent_over_another():
    gateway = await Gateway().start()
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing)
    with proxy_of(gateway) as proxy:
        sender.push(proxy.endpoint, 1, (delta(0),))
        await gateway.until(lambda: gateway.seqs == [0])

        proxy.half_open()
        sender.push(proxy.endpoint, 2, (delta(1),))

        async with asyncio.timeout(HEARTBEAT_S):
            await gateway.until(lambda: gateway.seqs == [0, 1])
        await sender.close()
    await gateway.close()


def proxy_of(gateway: Gateway) -> TcpProxy:
    return TcpProxy(("127.0.0.1", int(gateway.inbox.endpoint.rpartition(":")[2])))


async def test_an_idle_link_shows_life_and_its_step():
    gateway = await Gateway().start()
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing)
    sender.push(gateway.inbox.endpoint, 1, (delta(0),))
    await gateway.until(lambda: len(gateway.frames) >= 3)
    still = gateway.receiver.pulse("decode-1")

    sender.step = 2
    await gateway.until(lambda: gateway.receiver.pulse("decode-1").step == 2)

    moved = gateway.receiver.pulse("decode-1")
    assert still.step == 1
    assert still.last_frame_at > still.step_changed_at
    assert moved.step_changed_at > still.last_frame_at
    assert gateway.receiver.pulse("decode-2") is None
    await sender.close()
    await gateway.close()


async def test_a_gateway_that_restarts_at_its_address_gets_what_was_not_acknowledged():
    first = await Gateway().start()
    endpoint = first.inbox.endpoint
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=failing)
    for step in range(5):
        sender.push(endpoint, step, (delta(step),))
    await first.until(lambda: len(first.seqs) == 5)
    assert await sender.drained(LIMIT_S)

    await first.close()
    sender.push(endpoint, 5, (delta(5),))
    second = await restarted(endpoint)

    await second.until(lambda: second.seqs == [5])
    sender.push(endpoint, 6, (delta(6),))
    await second.until(lambda: second.seqs == [5, 6])
    assert await sender.drained(LIMIT_S)
    await sender.close()
    await second.close()


async def restarted(endpoint: str) -> Gateway:
    port = int(endpoint.rpartition(":")[2])
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await Gateway(port=port).start()
            except OSError:  # ZeroMQ closes the old socket in its own thread
                await asyncio.sleep(0.01)


async def test_a_gateway_that_acknowledges_nothing_overflows_and_a_later_push_starts_afresh():
    gateway = await Gateway().start()
    gateway.is_deaf = True
    given_up = []
    settings = DeltaSettings(max_unacknowledged_frames=10, delta_resend_s=0.2, sign_of_life_s=0.1)
    sender = DeltaSender(settings, worker_id="decode-1", on_overflow=given_up.append)

    for step in range(11):
        sender.push(gateway.inbox.endpoint, step, (delta(step),))

    assert given_up == [gateway.inbox.endpoint]
    assert sender.num_unacknowledged(gateway.inbox.endpoint) == 0
    gateway.is_deaf = False
    sender.push(gateway.inbox.endpoint, 99, (delta(99),))
    await gateway.until(lambda: 99 in gateway.seqs)
    await sender.close()
    await gateway.close()


async def test_a_gateway_that_is_gone_is_given_up_in_time():
    gateway = await Gateway().start()
    given_up: asyncio.Queue[str] = asyncio.Queue()
    settings = DeltaSettings(delta_give_up_s=0.2, delta_resend_s=0.1, sign_of_life_s=0.1)
    sender = DeltaSender(settings, worker_id="decode-1", on_overflow=given_up.put_nowait)
    sender.push(gateway.inbox.endpoint, 0, (delta(0),))
    assert await sender.drained(LIMIT_S)
    await gateway.close()

    sender.push(gateway.inbox.endpoint, 1, (delta(1),))

    assert await asyncio.wait_for(given_up.get(), LIMIT_S) == gateway.inbox.endpoint
    await sender.close()


async def test_an_endpoint_that_is_no_address_is_given_up_at_once():
    given_up = []
    sender = DeltaSender(QUICK, worker_id="decode-1", on_overflow=given_up.append)

    sender.push("nonsense", 0, (delta(0),))

    assert given_up == ["nonsense"]
    await sender.close()


async def test_a_probe_is_answered_by_the_inbox_itself():
    inbox = NoticeInbox(NoticeSettings(), worker_id="decode-1")
    await inbox.start(lambda notice, reply: reply(Ack(request_id="not", pair=PAIR)))
    peers = NoticePeers(NoticeSettings(notice_timeout_s=LIMIT_S), worker_id="gateway-1")

    assert await peers.probe(inbox.endpoint) == "decode-1"
    await peers.close()
    await inbox.close()


async def test_a_notice_is_answered_and_a_dead_peer_is_unavailable():
    inbox = NoticeInbox(NoticeSettings(), worker_id="decode-1")
    await inbox.start(lambda notice, reply: reply(Cancelled(request_id=notice.request_id, pair=notice.pair)))
    peers = NoticePeers(NoticeSettings(notice_timeout_s=0.05, notice_tries=2), worker_id="gateway-1")
    cancel = Cancel(request_id="r", pair=PAIR, reason="client_gone")

    answer = await peers.request(inbox.endpoint, cancel, timeout_s=LIMIT_S)
    assert answer == Cancelled(request_id="r", pair=PAIR)
    await inbox.close()
    with pytest.raises(PeerUnavailable, match="Cancel to tcp://"):
        await peers.request(inbox.endpoint, cancel)
    with pytest.raises(PeerUnavailable, match="nonsense"):
        await peers.request("nonsense", cancel)
    assert await peers.probe(inbox.endpoint) is None
    assert peers.send("nonsense", cancel) is False
    await peers.close()
