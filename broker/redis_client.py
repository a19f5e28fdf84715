"""One way to connect to Redis: which address, which options, which checks; and when to try again after a failure.

Options: RESP2 (one shape of replies), retries off (a repeated script would take a job twice), TCP keep-alive. Time-outs
are set by the callers around whole exchanges, so that a blocking read may last longer than a short command.
"""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog
from redis.asyncio.connection import AbstractConnection, Connection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from broker.errors import QueueMisconfigured, QueueUnavailable
from broker.redis_errors import unavailable
from broker.redis_replies import info_of, text

_log = structlog.get_logger(__name__)

_OLDEST_VERSION: Final = (7, 0)
_KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    redis: str = field(
        default="redis://127.0.0.1:6379/0",
        metadata={
            "help": "Redis or Valkey: one URL or a comma-separated list (redis://, rediss://, unix://);"
            " the one whose role is master is used"
        },
    )
    redis_timeout_s: float = field(default=5.0, metadata={"help": "limit of one exchange with Redis"})
    redis_connect_timeout_s: float = field(default=2.0, metadata={"help": "limit of connecting to one address"})
    redis_block_s: float = field(default=10.0, metadata={"help": "how long one blocking read of an idle worker lasts"})
    redis_backoff_min_s: float = field(default=0.05, metadata={"help": "pause after the first failed connection"})
    redis_backoff_max_s: float = field(default=1.0, metadata={"help": "longest pause between attempts to connect"})
    redis_gap_s: float = field(
        default=3.0,
        metadata={"help": "silence of Redis after which nobody counts as dead for a while; at most 2/3 of lease_s"},
    )
    redis_batch_max: int = field(default=256, metadata={"help": "most calls that share one exchange with Redis"})

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("redis: no address given")
        if min(self.redis_timeout_s, self.redis_connect_timeout_s, self.redis_block_s, self.redis_backoff_min_s) <= 0:
            raise ValueError("redis_*_s: times must be positive")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.redis.split(",") if part.strip())


class Connector(Protocol):
    """Opens connections that are ready for use."""

    where: str
    """Host and port, for messages; never the URL."""

    async def open(self) -> AbstractConnection:
        """A checked connection to the master. Raises QueueUnavailable or QueueMisconfigured."""


class MasterConnector:
    """Tries the addresses in order and takes the first whose ROLE is master."""

    def __init__(self, settings: RedisSettings, *, client_name: str = "pdq") -> None:
        self._settings = settings
        self._client_name = client_name
        self._reported: str = ""
        try:
            self._targets = [(_shown(url), parse_url(url)) for url in settings.addresses]
        except ValueError as exc:
            raise QueueMisconfigured(f"--redis: {exc}") from exc
        self.where = ", ".join(where for where, _ in self._targets)

    async def open(self) -> AbstractConnection:
        reasons: list[str] = []
        failure: QueueUnavailable | None = None
        for where, target in self._targets:
            connection = self._make(dict(target))
            is_kept = False
            try:
                async with asyncio.timeout(self._settings.redis_connect_timeout_s):
                    await connection.connect()  # type: ignore[no-untyped-call] # redis-py has no hints here
                    role = text((await ask(connection, "ROLE"))[0])
                    if role == "master":
                        self._check(where, info_of(await ask(connection, "INFO")))
                        is_kept = True
                        return connection
                reasons.append(f"{where} is a {role}")
            except (RedisError, OSError, QueueMisconfigured) as exc:  # OSError includes TimeoutError
                failure = unavailable(exc, where)
                reasons.append(str(failure))
            finally:
                if not is_kept:
                    await connection.disconnect(nowait=True)
        if failure is not None and len(self._targets) == 1:
            raise failure
        kind = QueueMisconfigured if isinstance(failure, QueueMisconfigured) else QueueUnavailable
        raise kind("no Redis master found: " + "; ".join(reasons))

    def _make(self, target: dict[str, Any]) -> AbstractConnection:
        cls = target.pop("connection_class", Connection)
        if not issubclass(cls, UnixDomainSocketConnection):
            target |= {"socket_keepalive": True, "socket_keepalive_options": _KEEPALIVE}
        target |= {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "socket_timeout": None,
            "socket_connect_timeout": self._settings.redis_connect_timeout_s,
            "client_name": self._client_name,
            "driver_info": None,
            "decode_responses": False,
        }
        connection: AbstractConnection = cls(**target)
        return connection

    def _check(self, where: str, info: dict[str, str]) -> None:
        """Refuses what would lose work; says once per server what is kept on disk."""
        version = info.get("redis_version", "0")
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < _OLDEST_VERSION:
            raise QueueMisconfigured(f"Redis at {where} is {version}; 7.0 or newer, or Valkey, is needed")
        if info.get("loading", "0") == "1":
            raise QueueUnavailable(f"Redis at {where} is loading its data; it will answer soon")
        if info.get("cluster_enabled", "0") == "1":
            raise QueueMisconfigured(
                f"Redis at {where} runs in cluster mode, which is not supported; use a single master"
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and info.get("maxmemory", "0") != "0":
            raise QueueMisconfigured(
                f"Redis at {where} may evict queued work (maxmemory-policy {policy});"
                " run CONFIG SET maxmemory-policy noeviction, and set it in its configuration file"
            )
        seen = f"{where} {info.get('run_id')}"
        if seen == self._reported:
            return
        self._reported = seen
        if policy != "noeviction":
            _log.warning("redis_would_evict", address=where, policy=policy, advice="set maxmemory-policy noeviction")
        has_aof = info.get("aof_enabled", "0") == "1"
        _log.info(
            "redis_connected", address=where, server=info.get("server_name", "redis"), version=version, aof=has_aof
        )
        if not has_aof:
            _log.warning("redis_without_aof", address=where, advice="appendonly yes keeps queued work over a restart")


async def ask(connection: AbstractConnection, *command: str | bytes | int) -> Any:
    """One command on a connection of one's own, with the raw reply. Raises RedisError; the caller sets the time-out."""
    await connection.send_packed_command(connection.pack_command(*command), check_health=False)
    return await connection.read_response(disable_decoding=True)


def _shown(url: str) -> str:
    target: Any = parse_url(url)
    return str(target.get("path") or f"{target.get('host', 'localhost')}:{target.get('port', 6379)}")


class Backoff:
    """Times attempts to connect. A caller waits for the next attempt, so calling again at once can't spin."""

    def __init__(self, settings: RedisSettings, rng: random.Random | None = None) -> None:
        self._min_s, self._max_s = settings.redis_backoff_min_s, settings.redis_backoff_max_s
        self._rng = rng or random.Random()
        self._pause_s = 0.0
        self._not_before = 0.0

    async def wait(self) -> None:
        pause_s = self._not_before - asyncio.get_running_loop().time()
        if pause_s > 0:
            await asyncio.sleep(pause_s)

    def failed(self) -> None:
        """The next attempt comes after twice the former pause, of which up to a half is cut at random."""
        self._pause_s = min(max(self._min_s, 2 * self._pause_s), self._max_s)
        self._not_before = asyncio.get_running_loop().time() + self._pause_s * self._rng.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        self._pause_s = 0.0
