"""A network between processes that loses, delays, repeats and reorders notices; and what passed through it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from broker.messages import Accepted, Admit, Deltas, DeltasAck, Go, KvReady, Reserve
from pdq.wire.types import Pair, unpack_ids
from tests.faults.notice_proxy import LOST, ON_TIME, Fate, Passing

TWICE: Final[Fate] = (0.0, 0.0, 0.3)
LATE: Final[Fate] = (0.5,)

QUESTION: Final = (KvReady, Reserve)
SCENARIOS: Final[dict[str, Callable[[Passing], Fate | None]]] = {
    "question lost": lambda it: LOST if _is(it, *QUESTION) and it.number <= 2 else None,
    "question doubled": lambda it: TWICE if _is(it, *QUESTION) else None,
    "question late": lambda it: LATE if _is(it, *QUESTION) else None,
    "answer lost": lambda it: LOST if _is(it, Accepted) and it.number <= 2 else None,
    "answer doubled": lambda it: TWICE if _is(it, Accepted, Go) else None,
    "admit lost": lambda it: LOST if _is(it, Admit) and it.number <= 2 else None,
    "admit doubled": lambda it: TWICE if _is(it, Admit) else None,
    "go lost": lambda it: LOST if _is(it, Go) and it.number <= 2 else None,
    "answer never": lambda it: LOST if _is(it, Accepted) and it.message.pair.gen == 1 else None,
}
"""What becomes of the notices of a request whose prompt begins so. None: nothing in particular."""


class Unreliable:
    """The fate of every notice. Used by several proxies' threads at once; nothing here needs a lock."""

    def __init__(self, seed: int) -> None:
        self.is_random = False
        """From now on any notice may have any fate."""
        self.workers: dict[tuple[str, Pair], set[str]] = defaultdict(set)
        """Per (request id, pair): the decode workers that sent tokens of it."""
        self.scenario_of: dict[str, str] = {}
        self._rng = random.Random(seed)

    def fate(self, passing: Passing) -> Fate:
        message = passing.message
        if isinstance(message, Deltas):
            for item in message.items:
                self.workers[item.request_id, item.pair].add(message.worker)
        if isinstance(message, QUESTION) and message.prompt_ids:
            prompt = bytes(token for token in unpack_ids(message.prompt_ids)[:40] if token < 256).decode()
            name = next((name for name in SCENARIOS if prompt.startswith(name)), "")
            self.scenario_of.setdefault(message.request_id, name)
        if self.is_random:
            return self._any()
        if isinstance(message, Deltas | DeltasAck):
            return self._any()
        scenario = self.scenario_of.get(getattr(message, "request_id", ""), "")
        fate = SCENARIOS[scenario](passing) if scenario else None
        return ON_TIME if fate is None else fate

    def _any(self) -> Fate:
        return self._rng.choices((ON_TIME, LOST, TWICE, (self._rng.random() * 0.3,)), (85, 5, 5, 5))[0]


def _is(passing: Passing, *kinds: type) -> bool:
    return isinstance(passing.message, kinds)
