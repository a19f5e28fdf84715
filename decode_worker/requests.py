"""The requests of a decode worker as a state table. Pure: events in, actions out, `now` is an argument.

ADMITTING --go--> RUNNING --finish | fail | cancel--> (answered)
ADMITTING --gone | fail | cancel--> (answered)

An answered pair is remembered, so that a repeated KvReady gets its answer again instead of a second decode.
For one request at most one pair is alive: a higher one replaces it, a lower one is Gone. Once tokens have left, only a
higher gen replaces it: a job that was given to a second worker must not end what the first one has brought under way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from broker.messages import Accepted, Delta, Gone, KvReady, Reserve, Start
from pdq.wire.types import Pair

Offer = KvReady | Reserve | Start
"""What asks D to decode: a finished prefill (pull), one that is about to be pushed, or the gateway itself (local)."""


class State(Enum):
    ADMITTING = auto()
    RUNNING = auto()


class Verdict(Enum):
    """What an offer is."""

    NEW = auto()
    ADMITTING = auto()
    """A repeat of one that is being admitted: answer when it is decided."""
    ANSWERED = auto()
    """Answer as before."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    offer: Offer
    deadline: float
    """When the gateway gives it up; monotonic seconds, as `now`."""
    state: State = State.ADMITTING
    next_seq: int = 0
    held_back: list[Delta] = field(default_factory=list)
    """Deltas that came before Go."""
    prefilled: KvReady | None = None
    """Push: what P said of the prefill."""

    @property
    def is_answering(self) -> bool:
        """Tokens have left: for the gateway its pair is frozen, and no attempt of the same gen may take over."""
        return self.state is State.RUNNING and self.next_seq > 0

    @property
    def engine_request_id(self) -> str:
        return f"{self.offer.request_id}:{self.offer.pair.gen}:{self.offer.pair.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    message: Accepted | Gone
    forget_at: float


class RequestTable:
    def __init__(self, *, answer_memory_s: float) -> None:
        self._answer_memory_s = answer_memory_s
        self._by_request: dict[str, DecodeRequest] = {}
        self._by_engine_id: dict[str, DecodeRequest] = {}
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    def classify(self, offer: Offer, now: float) -> tuple[Verdict, Accepted | Gone | None]:
        """Reads only, but for forgetting old answers. An answer comes with ANSWERED."""
        self._forget(now)
        current = self._by_request.get(offer.request_id)
        if current is not None and offer.pair <= current.offer.pair:
            if offer.pair < current.offer.pair:
                return Verdict.ANSWERED, _gone(offer, "a higher pair is here")
            if current.state is State.ADMITTING:
                return Verdict.ADMITTING, None
            return Verdict.ANSWERED, Accepted(request_id=offer.request_id, pair=offer.pair)
        if current is not None and current.is_answering and offer.pair.gen == current.offer.pair.gen:
            return Verdict.ANSWERED, _gone(offer, f"{current.offer.pair} is answered here already")
        answer = self._answers.get(offer.request_id)
        if answer is not None and offer.pair <= answer.message.pair:
            if offer.pair == answer.message.pair:
                return Verdict.ANSWERED, answer.message
            return Verdict.ANSWERED, _gone(offer, "a higher pair was here")
        return Verdict.NEW, None

    def open(self, offer: Offer, now: float) -> tuple[DecodeRequest, DecodeRequest | None]:
        """Starts a NEW one. Also returns the lower pair that it replaces: abort that in the engine."""
        replaced = self._by_request.get(offer.request_id)
        if replaced is not None:
            del self._by_engine_id[replaced.engine_request_id]
        request = DecodeRequest(offer=offer, deadline=now + offer.remaining_s)
        self._by_request[offer.request_id] = request
        self._by_engine_id[request.engine_request_id] = request
        return request, replaced

    def is_open(self, request: DecodeRequest) -> bool:
        return self._by_engine_id.get(request.engine_request_id) is request

    def go(self, request: DecodeRequest, now: float) -> list[Delta]:
        """Admitted. Returns the deltas that were held back."""
        if request.state is not State.ADMITTING:
            raise ValueError(f"{request.engine_request_id} was admitted before")
        request.state = State.RUNNING
        self._remember(Accepted(request_id=request.offer.request_id, pair=request.offer.pair), now)
        held_back, request.held_back = request.held_back, []
        return held_back

    def close(self, request: DecodeRequest, now: float, *, gone: str | None = None) -> None:
        """Finished, failed or cancelled; `gone` is the answer for repeats when it never ran."""
        self._by_engine_id.pop(request.engine_request_id, None)
        if self._by_request.get(request.offer.request_id) is request:
            del self._by_request[request.offer.request_id]
        if gone is not None:
            self._remember(_gone(request.offer, gone), now)

    def by_engine_id(self, engine_request_id: str) -> DecodeRequest | None:
        return self._by_engine_id.get(engine_request_id)

    def by_request_id(self, request_id: str) -> DecodeRequest | None:
        return self._by_request.get(request_id)

    def bar(self, request_id: str, pair: Pair, now: float, reason: str) -> None:
        """Cancelled before it came: a KvReady of this or a lower pair is Gone."""
        self._remember(Gone(request_id=request_id, pair=pair, reason=reason), now)

    def of_gateway(self, endpoint: str) -> list[DecodeRequest]:
        return [request for request in self._by_request.values() if request.offer.gateway == endpoint]

    def expired(self, now: float) -> list[DecodeRequest]:
        """Open ones whose deadline has passed."""
        return [request for request in self._by_request.values() if request.deadline <= now]

    def all(self) -> list[DecodeRequest]:
        return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def _remember(self, answer: Accepted | Gone, now: float) -> None:
        """The highest pair's answer stays: a cancel bars all lower pairs, also one that is closed after it."""
        self._forget(now)
        known = self._answers.get(answer.request_id)
        if known is not None and known.message.pair > answer.pair:
            return
        self._answers[answer.request_id] = _Answer(message=answer, forget_at=now + self._answer_memory_s)
        self._answers.move_to_end(answer.request_id)

    def _forget(self, now: float) -> None:
        while self._answers:
            oldest = next(iter(self._answers.values()))
            if oldest.forget_at > now:
                return
            self._answers.popitem(last=False)


def _gone(offer: Offer, reason: str) -> Gone:
    return Gone(request_id=offer.request_id, pair=offer.pair, reason=reason)
