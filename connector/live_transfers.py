"""Which request of this engine a transfer belongs to: one at a time, since messages name the transfer only. Pure."""

from __future__ import annotations

from collections import deque

from connector.params import KvParams, ParamsError, PullConsumer
from connector.side_channel import endpoint_of
from connector.transfers import TransferKey

_Use = tuple[type[KvParams], str, TransferKey]
"""The part that this engine plays, where the other side is (pull's reader only), and the transfer."""


class LiveTransfers:
    """`now` is in seconds of a monotonic clock."""

    def __init__(self, *, kept_s: float) -> None:
        """`kept_s`: for so long late messages of a transfer that has ended may still come."""
        self._kept_s = kept_s
        self._user_of: dict[_Use, str] = {}
        self._use_of: dict[str, _Use] = {}
        self._ended: deque[tuple[float, _Use]] = deque()

    def check(self, request: KvParams, now: float) -> None:
        """Raises ParamsError while another request has it, or has had it a moment ago."""
        while self._ended and self._ended[0][0] <= now:
            del self._user_of[self._ended.popleft()[1]]
        use = _use_of(request)
        if (user := self._user_of.get(use)) is not None:
            raise ParamsError(
                f"pdq_transfer_id: {use[2]} belongs to request {user} for now: a KV ticket can be used by one request"
                " at a time. For n > 1 send requests of their own; to try again, prefill with a higher pdq_attempt"
            )

    def begin(self, engine_request_id: str, request: KvParams) -> None:
        """After `check`."""
        use = self._use_of[engine_request_id] = _use_of(request)
        self._user_of[use] = engine_request_id

    def end(self, engine_request_id: str, now: float) -> None:
        """No worker half has anything under way for it. Unknown and repeated ids are ignored.

        A reader of pull may come again at once: its halves keep nothing, and P tells each load apart.
        """
        use = self._use_of.pop(engine_request_id, None)
        if use is not None and use[0] is PullConsumer:
            del self._user_of[use]
        elif use is not None:
            self._ended.append((now + self._kept_s, use))


def _use_of(request: KvParams) -> _Use:
    if isinstance(request, PullConsumer):
        ticket = request.ticket
        key = TransferKey(transfer_id=ticket.transfer_id, pair=ticket.pair)
        return PullConsumer, endpoint_of(ticket.host, ticket.port), key
    return type(request), "", TransferKey(transfer_id=request.transfer_id, pair=request.pair)
