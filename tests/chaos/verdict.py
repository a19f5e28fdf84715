"""The invariants, judged: over what the clients got, and over what is left when all is quiet again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tests.chaos.clients import Asked
from tests.chaos.plan import LONGEST_S, NUM_CLIENTS, Kind
from tests.chaos.strikes import Struck
from tests.pipeline import books
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.leftovers import OpenFiles, consumers_of_the_dead, lasting_keys, open_files

ENOUGH: Final = 0.5
ENOUGH_EACH: Final = 3
"""In a short run Redis may be away for a good part of the time, and then a client hears two errors a second: on a busy
machine they may outnumber the answers. So many answers for each client are enough, too."""
LATE_S: Final = 6.0
"""A deadline's 504 comes at most so much later than the deadline, a hanging gateway apart."""
AGAIN_S: Final = 2.0
"""So soon after a gateway is back its clients must be served."""
SPARE_FDS: Final = 8
LINK_FDS: Final = 6
"""Of the links between two processes: sockets, and ZeroMQ's own descriptors."""
IDLE_LINK_S: Final = 90.0
QUIET_LIMIT_S: Final = 60.0


class Fate(StrEnum):
    """What became of a request."""

    RIGHT = "right"
    LEFT = "left by its client"
    UNAVAILABLE = "503 while Redis was away"
    DEADLINE = "504 at its deadline"
    GATEWAY_GONE = "its gateway was ended"
    UNANSWERED = "WITHOUT ONE TRUTHFUL END"
    WRONG = "WRONG TEXT"


@dataclass(slots=True)
class Verdict:
    """`facts` and `problems` by law; no problems: it holds."""

    facts: dict[str, str] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    fates: Counter[Fate] = field(default_factory=Counter)
    """What became of the requests."""

    def say(self, law: str, fact: str, problems: Sequence[str] = ()) -> None:
        self.facts[law] = fact
        self.problems[law] = list(problems)

    @property
    def is_good(self) -> bool:
        return not any(self.problems.values())


def fate(asked: Asked, away: Sequence[tuple[float, float]]) -> Fate:
    """`away`: from when to when its gateway was, because it was killed or told to stop."""
    line, ask = asked.line, asked.ask
    ended_at = line.asked_at + line.seconds
    if not line.expected.startswith(line.text):
        return Fate.WRONG
    if line.is_right:
        return Fate.RIGHT
    if line.is_left:
        return Fate.LEFT
    code = line.error["code"] if line.error else ""
    if line.is_truthful and code == "queue_unavailable":
        return Fate.UNAVAILABLE
    if line.is_truthful and code in ("deadline", "deadline_exceeded") and ask.timeout_s is not None:
        return Fate.DEADLINE if line.seconds <= ask.timeout_s + LONGEST_S + LATE_S else Fate.UNANSWERED
    is_cut_off = line.broken or (line.is_truthful and code == "shutting_down")
    if is_cut_off and any(begin <= ended_at <= end + AGAIN_S for begin, end in away):
        return Fate.GATEWAY_GONE
    return Fate.WRONG if line.is_whole and line.error is None else Fate.UNANSWERED


def judge_answers(verdict: Verdict, asked: Sequence[Asked], struck: Sequence[Struck]) -> None:
    """I1, I2 and with it I6: the simulated engine's text depends on every KV byte that it reads."""
    away = [(s.at, s.until) for s in struck if s.strike.kind in (Kind.KILL_GATEWAY, Kind.TERMINATE_GATEWAY)]
    fates = [(fate(one, away if one.gateway == "gateway-2" else ()), one) for one in asked]
    counts = verdict.fates = Counter(found for found, _ in fates)
    told = ", ".join(f"{counts[found]} {found}" for found in Fate if counts[found])
    verdict.say(
        "I1 one end each", f"{len(asked)} requests: {told}", [_line(a) for f, a in fates if f is Fate.UNANSWERED]
    )
    num_tokens = sum(len(one.line.text) for one in asked)
    verdict.say("I2 exact text", f"{num_tokens} tokens compared", [_line(a) for f, a in fates if f is Fate.WRONG])
    slowest = max((one.line.seconds for one in asked), default=0.0)
    share = counts[Fate.RIGHT] / max(1, len(asked) - counts[Fate.LEFT] - counts[Fate.GATEWAY_GONE])
    has_answers = counts[Fate.RIGHT] >= ENOUGH_EACH * NUM_CLIENTS
    verdict.say(
        "service",
        f"{share:.1%} of those who stayed got their answer; the slowest one after {slowest:.1f} s",
        [] if share > ENOUGH or has_answers else ["too few right answers: nothing was tested"],
    )


async def judge_queue(verdict: Verdict, pipeline: Pipeline) -> None:
    """I3: every entry that was ever enqueued has one end, and the stream holds none."""
    added, states = await books.num_added(pipeline), await books.states(pipeline)
    problems = [f"{num} requests left in state {state!r}" for state, num in states.items() if state not in books.ENDED]
    if added != states.total():
        problems.append(f"{added} entries were added, {states.total()} are accounted for")
    dead = await pipeline.redis.xrange(pipeline.key("dead"))
    problems += [f"dead letter {letter}" for letter in dead]
    told = ", ".join(f"{number} {state}" for state, number in states.most_common())
    verdict.say("I3 entries", f"{added} since Redis lost data last: {told}", problems)


async def judge_rest(verdict: Verdict, pipeline: Pipeline, before: OpenFiles, *, num_ended: int | None) -> None:
    """I4: nothing is left, in the queue, in the KV pools, in Redis, in the processes that lived.

    Links to peers that are gone are closed when they were idle for a minute. `num_ended`: so many processes have ended,
    and their links are not waited for.
    """
    spare = SPARE_FDS + LINK_FDS * (num_ended or 0)
    limit_s = QUIET_LIMIT_S if num_ended is not None else QUIET_LIMIT_S + IDLE_LINK_S
    problems = []
    try:
        await pipeline.quiet(limit_s=QUIET_LIMIT_S)
    except AssertionError as error:
        problems.append(str(error))

    async def left() -> str:
        found = [f"key {name} without TTL" for name in sorted(await lasting_keys(pipeline))]
        found += [f"consumer {name} of a dead worker" for name in sorted(await consumers_of_the_dead(pipeline))]
        found += before.leaks(open_files(pipeline), spare=spare)
        return "; ".join(found[:10])

    try:
        await eventually(left, limit_s=limit_s, what="clean deployment")
    except AssertionError as error:
        problems.append(str(error))
    grown = before.growth(open_files(pipeline))
    verdict.say(
        "I4 nothing left",
        f"no pending entry, all pools as at the start; {len(grown)} processes lived, file descriptors"
        f" {min(grown.values(), default=0):+d} to {max(grown.values(), default=0):+d}",
        problems,
    )


def _line(asked: Asked) -> str:
    line = asked.line
    got = f"{len(line.text)} of {len(line.expected)} tokens"
    if not line.expected.startswith(line.text):
        at = next((n for n, (a, b) in enumerate(zip(line.text, line.expected, strict=False)) if a != b), "the end")
        got += f", wrong from {at} on: {line.text[-60:]!r} for {line.expected[:60]!r}"
    return (
        f"{asked.name} at {asked.gateway} {line.request_id or '(no id)'}: status {line.status}, {got}, whole"
        f" {line.is_whole}, {line.finish_reason}, error {line.error}, broken {line.broken!r}, {line.seconds:.1f} s"
    )
