"""Bad settings, or a bad machine, end a role at its start: exit code 2, and on stderr what to change."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.roles import ROLES, run_to_end, serving
from tests.servers import RedisServer, redis_binary

WORKERS = ROLES[1:]
BRISK = ("--heartbeat-s", "0.2", "--registry-ttl-s", "4")
"""A newcomer that doesn't fit looks again for one TTL; who is there must not be late with its heartbeat for so long."""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield int(server.getsockname()[1])


@pytest.fixture
def shared_redis(redis_server: RedisServer) -> RedisServer:
    """The session's server, empty."""
    with redis_server.client() as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(64).startswith(b"+OK")
    return redis_server


def broken_mooncake(folder: Path, source: str) -> dict[str, str]:
    """An environment in which `mooncake.engine` is this."""
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(source)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("role", "setting"),
    [
        *((role, setting) for role in ROLES for setting in ("--inbox-port", "--metrics-port")),
        ("gateway", "--http-port"),
        *((role, "--side-channel-port") for role in WORKERS),
    ],
)
def test_a_taken_port_is_named_with_its_setting_and_holder_before_anything_starts(
    role: str, setting: str, taken_port: int
) -> None:
    ended = run_to_end(role, setting, str(taken_port))

    assert ended.code == 2, ended.errors
    assert f"can't start: port {taken_port} on 127.0.0.1 ({setting}) is taken by " in ended.errors
    assert f"stop it or choose another {setting}" in ended.errors
    assert "(pid " in ended.errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--engine", "torch", "--model", "no-such-model"),
            "--model no-such-model: no such folder with a config.json",
        ),
        (("--engine", "torch", "--model", "no-such-model"), "run `pdq model fetch no-such-model` first"),
        (("--engine", "torch"), "--engine torch needs --model: a model folder, or a name that `pdq model fetch`"),
        (("--side-channel-host", "0.0.0.0"), "which no peer can connect to: set it to this host's address"),
        (("--side-channel-host", "203.0.113.1"), "203.0.113.1 is no address of this machine"),
        (("--inbox-host", "0.0.0.0"), "peers can't connect to 0.0.0.0: set advertise_host to this machine's address"),
        (("--kv-answer-s", "5"), "must be below kv_lease_s = 10 s"),
        (("--served-model-name", "my model"), "no braces and no white space"),
    ],
)
def test_settings_that_can_not_work_are_refused_before_redis_is_asked(flags: tuple[str, ...], message: str) -> None:
    ended = run_to_end("prefill_worker", *flags)

    assert ended.code == 2, ended.errors
    assert message in ended.errors


@pytest.mark.parametrize("role", ROLES)
def test_a_redis_that_may_evict_queued_work_is_refused(role: str, tmp_path: Path) -> None:
    server = RedisServer(
        redis_binary(), tmp_path, options=("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    )
    server.start()
    try:
        ended = run_to_end(role, redis=server.url)
    finally:
        server.kill()

    assert ended.code == 2, ended.errors
    assert f"Redis at 127.0.0.1:{server.port} may evict queued work (maxmemory-policy allkeys-lru)" in ended.errors
    assert "run CONFIG SET maxmemory-policy noeviction" in ended.errors


def test_a_redis_that_refuses_the_login_is_named(tmp_path: Path) -> None:
    server = RedisServer(redis_binary(), tmp_path, options=("--requirepass", "secret"))
    server.start()
    try:
        ended = run_to_end("prefill_worker", redis=server.url)
    finally:
        server.kill()

    assert ended.code == 2, ended.errors
    assert "refuses the login" in ended.errors
    assert "put user and password into --redis" in ended.errors


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')",
            "Mooncake needs the system library libibverbs.so.1, which is missing: apt-get install libibverbs1",
            id="system library",
        ),
        pytest.param(
            "raise ModuleNotFoundError('No module named mooncake')",
            "Mooncake can't be imported (No module named mooncake): pip install",
            id="not installed",
        ),
        pytest.param(
            "class TransferEngine:\n    def initialize(self, *args): return -1\n",
            "the Transfer Engine does not start on 127.0.0.1: status -1",
            id="does not start",
        ),
        pytest.param(
            "class TransferEngine:\n"
            "    def initialize(self, *args): return 0\n"
            "    def get_rpc_port(self): return 1\n"
            "    def register_memory(self, *args): return -600\n",
            "can't be registered: status -600",
            id="memory",
        ),
    ],
)
def test_a_mooncake_that_does_not_work_is_told_by_the_worker(
    source: str, message: str, tmp_path: Path, shared_redis: RedisServer
) -> None:
    ended = run_to_end("decode_worker", redis=shared_redis.url, environ=broken_mooncake(tmp_path, source))

    assert ended.code == 2, ended.errors
    assert message in ended.errors.partition("can't start: ")[2]


def test_mooncakes_old_framing_is_refused(shared_redis: RedisServer) -> None:
    ended = run_to_end("prefill_worker", redis=shared_redis.url, environ={"MC_TCP_PROTO": "1"})

    assert ended.code == 2, ended.errors
    assert "unset MC_TCP_PROTO" in ended.errors.partition("can't start: ")[2]


def test_a_worker_that_does_not_fit_the_other_side_is_refused_with_both_values(shared_redis: RedisServer) -> None:
    with serving("prefill_worker", shared_redis, *BRISK) as prefill:
        ended = run_to_end("decode_worker", "--block-size", "32", "--sim-layers", "8", *BRISK, redis=shared_redis.url)

    assert ended.code == 2, ended.errors
    assert "can't start: this decode worker fits no prefill worker of 'sim'" in ended.errors
    assert f"{prefill['worker_id']}: block_size: 32 here, 16 there; layers: 8 here, 4 there." in ended.errors


@pytest.mark.parametrize("role", ROLES)
def test_a_process_in_another_mode_than_its_model_is_refused(role: str, shared_redis: RedisServer) -> None:
    with shared_redis.client() as connection:
        connection.sendall(b"HSET pdq:{sim}:config mode push\r\n")
        assert connection.recv(64).startswith(b":1")

    ended = run_to_end(role, *BRISK, redis=shared_redis.url)

    assert ended.code == 2, ended.errors
    assert "can't start: mode is pull here, but push in every running process of this model" in ended.errors
