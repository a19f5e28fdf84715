"""The shared connection: pipelining, cancelled callers, the choice of the server, refusals, back-off."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.errors import QueueMisconfigured, QueueUnavailable
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_replies import fields, info_of, newest_ids
from tests.broker.stores import LIMIT_S, PATIENCE, FakeConnector, RedisStore, eventually, job, real_calls
from tests.servers import RedisServer, free_port, redis_binary


def patient(url: str, **changes: float) -> RedisCalls:
    return RedisCalls(RedisSettings(redis=url, **{**PATIENCE, **changes}))


@pytest.fixture
async def calls(redis_server: RedisServer) -> AsyncIterator[RedisCalls]:
    made = await real_calls(redis_server.url)
    yield made
    await made.close()


async def test_cancelled_callers_never_shift_the_replies_of_others(calls: RedisCalls) -> None:
    rng = random.Random(7)

    async def caller(number: int) -> bool:
        return await calls.call("ECHO", f"n{number}") == f"n{number}".encode()

    tasks: list[asyncio.Task[bool]] = []
    for wave in range(20):
        tasks += [asyncio.create_task(caller(30 * wave + number)) for number in range(30)]
        for _ in range(rng.randint(1, 4)):  # their commands are waiting, under way, or half answered
            await asyncio.sleep(0)
        for task in rng.sample(tasks[-60:], 20):
            task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)

    cancelled = [answer for answer in answers if isinstance(answer, asyncio.CancelledError)]
    assert len(cancelled) > 50
    assert len(answers) - len(cancelled) > 50
    assert all(answer is True for answer in answers if not isinstance(answer, asyncio.CancelledError))
    assert await calls.call("ECHO", "still in step") == b"still in step"


async def test_calls_of_one_loop_turn_travel_together(calls: RedisCalls) -> None:
    await calls.start()
    before = info_of(await calls.call("INFO", "stats"))["total_reads_processed"]

    await asyncio.gather(*(calls.call("ECHO", str(number)) for number in range(100)))

    after = info_of(await calls.call("INFO", "stats"))["total_reads_processed"]
    assert int(after) - int(before) <= 10


async def test_an_error_reply_fails_its_own_call_only(calls: RedisCalls) -> None:
    good, bad, good_too = await asyncio.gather(
        calls.call("ECHO", "a"), calls.call("NOSUCHCOMMAND"), calls.call("ECHO", "b"), return_exceptions=True
    )

    assert (good, good_too) == (b"a", b"b")
    assert isinstance(bad, QueueUnavailable)


async def test_a_sleeping_worker_does_not_hold_up_short_calls(calls: RedisCalls) -> None:
    store = RedisStore("redis", calls)
    sleeper = asyncio.create_task(store.queue.wait(LIMIT_S))

    for _ in range(20):
        assert (await store.queue.depth()).queued == 0

    async def two_are_connected() -> bool:  # none of them opens a third; one of a former test may be closing still
        return (await calls.call("CLIENT", "LIST")).count(b"name=pdq") == 2

    await eventually(two_are_connected)
    assert not sleeper.done()
    await store.queue.enqueue(job())
    assert await sleeper
    await store.close()


async def test_cancelled_sleepers_leave_a_usable_reader_behind(calls: RedisCalls) -> None:
    store = RedisStore("redis", calls)
    for _ in range(5):
        assert not await store.queue.wait(0.01)
    await store.queue.enqueue(job())

    assert await store.queue.wait(LIMIT_S)
    await store.close()


async def test_an_evicting_server_is_refused_with_what_to_do(tmp_path: Path) -> None:
    options = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    server = RedisServer(redis_binary(), tmp_path, options=options)
    server.start()
    refused, allowed = patient(server.url), patient(server.url)

    with pytest.raises(QueueMisconfigured, match="maxmemory-policy noeviction"):
        await refused.start()
    await refused.close()
    with server.client() as client:
        client.sendall(b"CONFIG SET maxmemory 0\r\n")
        client.recv(64)
    await allowed.start()  # it would evict, but has no limit: a warning only

    await allowed.close()
    server.kill()


async def test_a_cluster_node_is_refused(tmp_path: Path) -> None:
    own_port = ("--cluster-port", str(free_port()))  # its default, 10,000 above the other, may be too high
    server = RedisServer(redis_binary(), tmp_path, options=("--cluster-enabled", "yes", *own_port))
    server.start()
    calls = patient(server.url)

    with pytest.raises(QueueMisconfigured, match="cluster mode"):
        await calls.start()

    await calls.close()
    server.kill()


async def test_text_that_can_not_be_encoded_fails_its_own_caller_only(calls: RedisCalls) -> None:
    bad, good = await asyncio.gather(calls.call("ECHO", "\ud800"), calls.call("ECHO", "fine"), return_exceptions=True)

    assert isinstance(bad, UnicodeEncodeError)
    assert good == b"fine"


async def test_of_several_addresses_the_master_is_used_also_after_a_switch(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    old = RedisServer(redis_binary(), tmp_path / "a")
    old.start()
    new = RedisServer(redis_binary(), tmp_path / "b", options=("--replicaof", f"127.0.0.1 {old.port}"))
    new.start()
    calls = patient(f"{new.url}, {old.url}", redis_backoff_min_s=0.01)
    assert await calls.call("SET", "k", "on the old master") == b"OK"
    assert info_of(await calls.call("INFO", "server"))["tcp_port"] == str(old.port)

    for server, target in ((new, "NO ONE"), (old, f"127.0.0.1 {new.port}")):
        with server.client() as client:
            client.sendall(f"REPLICAOF {target}\r\n".encode())
            client.recv(64)
    with pytest.raises(QueueUnavailable, match="replica"):
        await calls.call("SET", "k", "refused by the old one")

    assert await calls.call("SET", "k", "on the new master") == b"OK"
    assert info_of(await calls.call("INFO", "server"))["tcp_port"] == str(new.port)
    await calls.close()
    for server in (old, new):
        server.kill()


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    calls = RedisCalls(RedisSettings(redis="redis://user:secret@127.0.0.1:1/0"))

    with pytest.raises(QueueUnavailable, match=r"127\.0\.0\.1:1 can't be reached") as caught:
        await calls.start()

    assert "secret" not in str(caught.value)
    await calls.close()


async def test_a_wrong_password_and_a_wrong_url_say_what_to_change(tmp_path: Path) -> None:
    server = RedisServer(redis_binary(), tmp_path, options=("--requirepass", "right"))
    server.start()
    wrong = patient(f"redis://:wrong@127.0.0.1:{server.port}/0")
    none = patient(server.url)
    right = patient(f"redis://:right@127.0.0.1:{server.port}/0")

    for calls in (wrong, none):
        with pytest.raises(QueueMisconfigured, match="password into --redis"):
            await calls.start()
    await right.start()
    with pytest.raises(QueueMisconfigured, match="--redis"):
        RedisCalls(RedisSettings(redis="http://127.0.0.1"))

    for calls in (wrong, none, right):
        await calls.close()
    server.kill()


async def test_a_unix_socket_works() -> None:
    with tempfile.TemporaryDirectory(prefix="pdq") as folder:
        path = Path(folder) / "s"
        server = RedisServer(redis_binary(), Path(folder), options=("--unixsocket", str(path)))
        server.start()
        calls = patient(f"unix://{path}?db=1")

        assert await calls.call("ECHO", "x") == b"x"

        await calls.close()
        server.kill()


async def test_calls_while_the_server_is_down_fail_soon_but_do_not_spin() -> None:
    class Down(FakeConnector):
        async def open(self) -> object:
            self.num_opened += 1
            raise QueueUnavailable("down")

    down = Down()
    calls = RedisCalls(RedisSettings(redis_backoff_min_s=0.02, redis_backoff_max_s=0.1), connector=down)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async with asyncio.timeout(LIMIT_S):
        for number in range(1, 11):
            with pytest.raises(QueueUnavailable, match="down"):
                await calls.call("PING")
            assert down.num_opened == number

    pauses_s = (0.02, 0.04, 0.08, *[0.1] * 6)  # of which up to a half is cut
    assert loop.time() - began >= sum(pauses_s) / 2
    await calls.close()


async def test_a_server_that_stands_still_fails_calls_in_time_and_is_used_again(private_redis: RedisServer) -> None:
    settings = RedisSettings(redis=private_redis.url, redis_timeout_s=0.2, redis_connect_timeout_s=0.2)
    calls = RedisCalls(settings)

    async def answers() -> bool:
        try:
            return await calls.call("ECHO", "here") == b"here"
        except QueueUnavailable:
            return False

    await eventually(answers)
    private_redis.pause()

    for _ in range(2):
        with pytest.raises(QueueUnavailable, match="did not answer in time"):
            await calls.call("PING")
    private_redis.resume()

    await eventually(answers)
    await calls.close()


async def test_calls_after_the_close_are_refused(calls: RedisCalls) -> None:
    await calls.close()

    with pytest.raises(QueueUnavailable, match="closed"):
        await calls.call("PING")


def test_replies_read_the_same_as_resp2_and_resp3() -> None:
    assert fields([b"a", b"1", b"b", b""]) == fields({b"a": b"1", b"b": b""}) == {"a": "1", "b": ""}
    entry = [b"5-1", [b"x", b"y"]]
    assert newest_ids([[b"s", [entry]]]) == newest_ids({b"s": [entry]}) == newest_ids({b"s": [[entry]]}) == {"s": "5-1"}
    assert newest_ids(None) == {}
