"""What happens and what is asked in a chaos run: pure functions of the seed. Times: seconds from the load's start."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.pipeline.ledger import text_of

PREFILL, DECODE = 3, 2
"""Worker processes at the start; scaling adds and takes some."""
GATEWAYS: Final = 2
NUM_CLIENTS: Final = 16
STORM: Final = range(6, 13)
STORM_GAP_S: Final = (0.1, 2.0)
CALM: Final = 3
CALM_GAP_S: Final = (7.0, 10.0)
QUIET_START_S: Final = 1.5
LONGEST_S: Final = 5.0
"""No strike lasts longer. The last ones begin so long before the end."""


class Kind(StrEnum):
    """What can happen. A hanging process is stopped (SIGSTOP) and woken up after `lasts_s`."""

    KILL = "kill worker"
    KILL_ENGINE = "kill engine"
    TERMINATE = "terminate worker"
    HANG = "hang worker and engine"
    HANG_WORKER = "hang worker"
    HANG_ENGINE = "hang engine"
    SCALE = "scale"
    CUT_REDIS = "cut redis connections"
    HANG_REDIS = "hang redis"
    RESTART_REDIS = "restart redis"
    FLUSH_REDIS = "flush redis"
    HANG_GATEWAY = "hang gateway"
    KILL_GATEWAY = "kill gateway"
    TERMINATE_GATEWAY = "terminate gateway"


TAKES_A_WORKER: Final = frozenset({Kind.KILL, Kind.KILL_ENGINE, Kind.HANG, Kind.HANG_WORKER, Kind.HANG_ENGINE})
"""After these the requests of one worker stand still until somebody else goes on with them."""
_ENDS_A_WORKER: Final = frozenset({Kind.KILL, Kind.KILL_ENGINE, Kind.TERMINATE})
_WEIGHTS: Final = {
    Kind.KILL: 5,
    Kind.KILL_ENGINE: 3,
    Kind.TERMINATE: 2,
    Kind.HANG: 3,
    Kind.HANG_WORKER: 2,
    Kind.HANG_ENGINE: 2,
    Kind.SCALE: 3,
    Kind.CUT_REDIS: 2,
    Kind.HANG_REDIS: 2,
    Kind.RESTART_REDIS: 2,
    Kind.FLUSH_REDIS: 1,
    Kind.HANG_GATEWAY: 2,
    Kind.KILL_GATEWAY: 1,
    Kind.TERMINATE_GATEWAY: 1,
}
_LASTS_S: Final = {
    Kind.HANG: (0.5, 3.0, LONGEST_S),
    Kind.HANG_WORKER: (0.5, 3.0, LONGEST_S),
    Kind.HANG_ENGINE: (0.5, 3.0, LONGEST_S),
    Kind.HANG_REDIS: (0.5, 1.5, 4.0),
    Kind.RESTART_REDIS: (0.0, 0.5, 2.0),
    Kind.HANG_GATEWAY: (0.3, 1.5, LONGEST_S),
}
_OF_REDIS: Final = frozenset({Kind.CUT_REDIS, Kind.HANG_REDIS, Kind.RESTART_REDIS, Kind.FLUSH_REDIS})
_OF_GATEWAY: Final = frozenset({Kind.HANG_GATEWAY, Kind.KILL_GATEWAY, Kind.TERMINATE_GATEWAY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    number: int
    at_s: float
    kind: Kind
    victim: str
    """A process of the deployment (`prefill-2`), `redis`, or the numbers to scale to (`prefill=4 decode=2`)."""
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:g} s" if self.lasts_s else ""
        return f"{self.at_s:7.2f} s  {self.kind} {self.victim}{lasts}"


def strikes(seed: int, seconds: float, kinds: Iterable[Kind] = tuple(Kind)) -> tuple[Strike, ...]:
    """In order of time: storms, in which strikes overlap; after each some single strikes at workers, far apart, to see
    what one alone does. In a storm one worker of each role may hang but isn't ended: how long it takes until a process
    has started again says little about pdq. What hangs isn't struck again before it wakes up.
    """
    rng = random.Random(f"strikes {seed}")
    allowed = [kind for kind in Kind if kind in frozenset(kinds)]
    calm = [kind for kind in allowed if kind in TAKES_A_WORKER] or allowed
    planned: list[Strike] = []
    hangs_until: dict[str, float] = {}
    at_s = QUIET_START_S
    num_in_storm, num_calm = rng.choice(STORM), 0
    spared = _spared(rng)
    while at_s < seconds - LONGEST_S:
        choice = allowed if num_in_storm else calm
        kind = rng.choices(choice, [_WEIGHTS[kind] for kind in choice])[0]
        victim, lasts_s = _victim(kind, rng, spared), rng.choice(_LASTS_S.get(kind, (0.0,)))
        if hangs_until.get(victim, 0.0) <= at_s:
            hangs_until[victim] = at_s + lasts_s + (1.0 if victim == "redis" else 0.0)
            planned.append(Strike(number=len(planned) + 1, at_s=at_s, kind=kind, victim=victim, lasts_s=lasts_s))
        if num_in_storm:
            num_in_storm -= 1
            num_calm = 0 if num_in_storm else CALM
            gap_s = rng.uniform(*(STORM_GAP_S if num_in_storm else CALM_GAP_S))
        else:
            num_calm -= 1
            num_in_storm = 0 if num_calm else rng.choice(STORM)
            spared = _spared(rng)
            gap_s = rng.uniform(*CALM_GAP_S)
        at_s = round(at_s + gap_s, 3)
    return tuple(planned)


def _spared(rng: random.Random) -> frozenset[str]:
    return frozenset({f"prefill-{rng.randint(1, PREFILL)}", f"decode-{rng.randint(1, DECODE)}"})


def _victim(kind: Kind, rng: random.Random, spared: frozenset[str]) -> str:
    if kind in _OF_REDIS:
        return "redis"
    if kind in _OF_GATEWAY:  # the first one only hangs: its clients may not lose anything
        return rng.choice(("gateway-1", "gateway-2")) if kind is Kind.HANG_GATEWAY else "gateway-2"
    if kind is Kind.SCALE:
        return f"prefill={rng.randint(PREFILL - 1, PREFILL + 1)} decode={rng.randint(DECODE, DECODE + 1)}"
    workers = [*(f"prefill-{n + 1}" for n in range(PREFILL)), *(f"decode-{n + 1}" for n in range(DECODE))]
    return rng.choice([worker for worker in workers if kind not in _ENDS_A_WORKER or worker not in spared])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of one client."""

    prompt: str
    max_tokens: int
    is_stream: bool
    stop: str | None
    leave_after_s: float | None
    """The client hangs up then, if it has no answer yet."""
    timeout_s: float | None
    """The request's deadline."""

    @property
    def expected(self) -> str:
        """The simulated engine echoes its prompt."""
        text = self.prompt[: self.max_tokens]
        return text if self.stop is None else text.partition(self.stop)[0]


def ask(seed: int, client: int, turn: int) -> Ask:
    """What client `client` asks in its turn `turn`; both from 1."""
    rng = random.Random(f"ask {seed} {client} {turn}")
    length = rng.choice((5, 100, 100, 1500))
    num_shared = rng.choice((0, 0, length // 2))
    shared = text_of(1500, random.Random(f"shared {seed}"))[:num_shared]
    prompt = f"{shared}{client}.{turn} {text_of(length - num_shared, rng)}"
    has_stop, leaves, has_timeout = rng.random() < 0.1, rng.random() < 0.1, rng.random() < 0.05
    middle = rng.randrange(len(prompt) - 3)
    return Ask(
        prompt=prompt,
        max_tokens=rng.choice((1, 20, 20, 200, 200, 200, 600, 600)),
        is_stream=rng.random() < 0.75,
        stop=prompt[middle : middle + 3] if has_stop else None,
        leave_after_s=rng.random() if leaves else None,
        timeout_s=rng.uniform(0.2, 3.0) if has_timeout else None,
    )


def as_lines(planned: Iterable[Strike]) -> str:
    """For a file: one JSON document per strike."""
    return "".join(json.dumps(dataclasses.asdict(strike)) + "\n" for strike in planned)
