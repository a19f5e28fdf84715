"""Typed sockets for notices: the inbox of a process, and requests to the inboxes of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from broker.errors import PeerUnavailable
from broker.messages import Alive, Notice, Probe
from pdq.wire.codec import Codec
from pdq.wire.endpoints import advertised_host
from pdq.wire.sockets import Inbox, Peers, Reply

NOTICES: Final[Codec[Notice]] = Codec(Notice)

NoticeReply = Reply[Notice]
"""`reply(answer) -> bool`; False: the asker is gone. It will ask again if it still cares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSettings:
    """Where this process listens, and how patient it is with others."""

    inbox_host: str = field(default="127.0.0.1", metadata={"help": "address that the ZeroMQ inbox listens on"})
    inbox_port: int = field(default=0, metadata={"help": "port of the ZeroMQ inbox; 0 picks a free one"})
    advertise_host: str = field(
        default="", metadata={"help": "address told to peers; needed when listening on a wildcard"}
    )
    notice_timeout_s: float = field(default=0.2, metadata={"help": "wait this long for an answer before asking again"})
    notice_tries: int = field(default=5, metadata={"help": "times to ask before a peer counts as unavailable"})
    notice_hwm: int = field(default=1000, metadata={"help": "messages queued per peer before sending is refused"})

    def __post_init__(self) -> None:
        try:
            advertised_host(self.inbox_host, self.advertise_host or None)
        except ValueError:
            told = self.advertise_host or self.inbox_host
            raise ValueError(f"peers can't connect to {told}: set advertise_host to this machine's address") from None


class NoticeInbox:
    """Receives the notices of this process; answers Probe by itself. Raises OSError when the port is taken."""

    def __init__(self, settings: NoticeSettings, *, worker_id: str) -> None:
        self._worker_id = worker_id
        self._inbox = Inbox(
            NOTICES,
            host=settings.inbox_host,
            port=settings.inbox_port,
            advertise_host=settings.advertise_host or None,
            hwm=settings.notice_hwm,
        )
        self._handler: Callable[[Notice, NoticeReply], None] | None = None

    @property
    def endpoint(self) -> str:
        """`tcp://host:port` for the registry and for messages."""
        return self._inbox.endpoint

    @property
    def num_undecodable(self) -> int:
        return self._inbox.num_undecodable

    @property
    def num_dropped(self) -> int:
        """Answers that could not be sent."""
        return self._inbox.num_dropped

    async def start(self, handler: Callable[[Notice, NoticeReply], None]) -> None:
        """Hands each notice to the handler: synchronous and quick. It may keep the reply and answer later."""
        self._handler = handler
        await self._inbox.start(self._handle)

    async def close(self) -> None:
        await self._inbox.close()

    def _handle(self, notice: Notice, reply: NoticeReply) -> None:
        if isinstance(notice, Probe):
            reply(Alive(worker=self._worker_id))
        elif self._handler is not None:
            self._handler(notice, reply)


class NoticePeers:
    """Asks the inboxes of other processes. Links are made on first use and closed when idle."""

    def __init__(self, settings: NoticeSettings, *, worker_id: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._peers = Peers(NOTICES, identity=worker_id, hwm=settings.notice_hwm)

    def send(self, endpoint: str, notice: Notice) -> bool:
        """One way, at most once. False: dropped, also when the endpoint is no address."""
        try:
            return self._peers.send(endpoint, notice)
        except OSError:
            return False

    async def request(
        self, endpoint: str, notice: Notice, *, timeout_s: float | None = None, tries: int | None = None
    ) -> Notice:
        """The answer; the notice is repeated until there is one, so its receiver must bear repeats.

        Raises PeerUnavailable when no answer came in time, the endpoint is no address, or `close` was called.
        """
        settings = self._settings
        try:
            return await self._peers.request(
                endpoint,
                notice,
                timeout_s=settings.notice_timeout_s if timeout_s is None else timeout_s,
                tries=settings.notice_tries if tries is None else tries,
            )
        except OSError as exc:  # TimeoutError is one
            raise PeerUnavailable(str(exc)) from exc

    async def probe(self, endpoint: str, *, timeout_s: float | None = None, tries: int | None = None) -> str | None:
        """The worker id of whoever listens there; None when nobody answers. Another id: the former process is gone."""
        try:
            answer = await self.request(endpoint, Probe(sender=self._worker_id), timeout_s=timeout_s, tries=tries)
        except PeerUnavailable:
            return None
        return answer.worker if isinstance(answer, Alive) else None

    async def close(self) -> None:
        await self._peers.close()
