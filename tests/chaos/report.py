"""The report of a chaos run as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.plan import NUM_CLIENTS, Kind
from tests.chaos.recovery import Recovery, histogram, quantile
from tests.chaos.run import HEARTBEAT_S, LEASE_S, Report
from tests.chaos.verdict import Fate

SHOWN_PROBLEMS = 8
SHOWN_SLOWEST = 3


def as_text(report: Report) -> str:
    return "\n".join([*_strikes(report), "", *_recovery(report.recoveries), "", *_verdict(report)])


def replay_command(report: Report) -> str:
    kinds = "" if report.kinds == frozenset(Kind) else f' --kinds "{",".join(sorted(report.kinds))}"'
    return f"python -m tests.chaos --seconds {report.seconds:g} --seed {report.seed} --mode {report.mode}{kinds}"


def as_tables(reports: Sequence[Report]) -> str:
    """Of several runs, in Markdown: what came out of each, and what was struck."""
    outcomes = [
        "| run | requests | right | client left | honest errors | wrong | unanswered | recovery p50 / p99 / max, s"
        " | with no other strike near | laws |",
        "|" + "---|" * 10,
        *(_outcome_row(report) for report in reports),
    ]
    counts = [Counter(one.strike.kind for one in report.struck if not one.note) for report in reports]
    strikes = [
        f"| strikes | {' | '.join(map(_name, reports))} |",
        "|---|" + "---|" * len(reports),
        *(f"| {kind} | {' | '.join(str(count[kind]) for count in counts)} |" for kind in Kind),
        f"| together | {' | '.join(str(count.total()) for count in counts)} |",
    ]
    return "\n".join([*outcomes, "", *strikes])


def _outcome_row(report: Report) -> str:
    fates = report.verdict.fates
    honest = sum(fates[fate] for fate in (Fate.UNAVAILABLE, Fate.DEADLINE, Fate.GATEWAY_GONE))
    laws = sorted((law.split()[0], bool(problems)) for law, problems in report.verdict.problems.items())
    said = {
        "hold": [law for law, is_broken in laws if not is_broken],
        "BROKEN": [law for law, is_broken in laws if is_broken],
    }
    cells = (
        _name(report),
        fates.total(),
        fates[Fate.RIGHT],
        fates[Fate.LEFT],
        honest,
        fates[Fate.WRONG],
        fates[Fate.UNANSWERED],
        _short([one.seconds for one in report.recoveries]),
        _short([one.seconds for one in report.recoveries if one.is_undisturbed]),
        ", ".join(f"{' '.join(found)} {word}" for word, found in said.items() if found),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _name(report: Report) -> str:
    return f"{report.mode} {report.seed}"


def _short(values: Sequence[float]) -> str:
    if not values:
        return "none"
    numbers = (quantile(values, 0.5), quantile(values, 0.99), max(values))
    return f"{' / '.join(f'{number:.1f}' for number in numbers)} ({len(values)})"


def _strikes(report: Report) -> Iterable[str]:
    counts = Counter(one.strike.kind for one in report.struck if not one.note)
    yield (
        f"chaos: mode {report.mode}, seed {report.seed}, {report.seconds:g} s, {NUM_CLIENTS} clients,"
        f" {len(report.struck)} strikes"
    )
    yield "  " + ", ".join(f"{kind} {number}" for kind, number in counts.most_common())
    if missed := sum(bool(one.note) for one in report.struck):
        yield f"  {missed} times the victim was not there"


def _recovery(recoveries: Sequence[Recovery]) -> Iterable[str]:
    alone = [one for one in recoveries if one.is_undisturbed]
    yield (
        f"recovery of requests whose worker was struck (lease {LEASE_S:g} s, heartbeat {HEARTBEAT_S:g} s; tests/chaos/"
        "recovery.py says what it is)"
    )
    for title, some in (("all", recoveries), ("undisturbed by other strikes", alone)):
        yield f"  {title:30} {_numbers([one.seconds for one in some])}"
    for kind in sorted({one.kind for one in recoveries}):
        yield f"    {kind:28} {_numbers([one.seconds for one in recoveries if one.kind == kind])}"
    for one in sorted(recoveries, key=lambda one: -one.seconds)[:SHOWN_SLOWEST]:
        yield f"    {one.seconds:5.2f} s  request {one.request_id} after {one.kind} {one.victim} at {one.at_s:.2f} s"
    below = 0.0
    for bound, number in histogram([one.seconds for one in recoveries]):
        label = f"above {below:g} s" if bound == math.inf else f"to {bound:g} s"
        yield f"  {label:>12} {number:5} {'#' * math.ceil(50 * number / max(1, len(recoveries)))}"
        below = bound


def _numbers(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return (
        f"{len(values):5} requests   p50 {quantile(values, 0.5):5.2f} s   p99 {quantile(values, 0.99):5.2f} s"
        f"   max {max(values):5.2f} s"
    )


def _verdict(report: Report) -> Iterable[str]:
    verdict = report.verdict
    for law, fact in verdict.facts.items():
        problems = verdict.problems[law]
        yield f"  {'FAIL' if problems else 'ok':4} {law:18} {fact}"
        yield from (f"         {problem}" for problem in problems[:SHOWN_PROBLEMS])
        if len(problems) > SHOWN_PROBLEMS:
            yield f"         and {len(problems) - SHOWN_PROBLEMS} more"
    if verdict.is_good:
        yield "verdict: nothing lost, nothing wrong, nothing left"
        return
    yield f"verdict: FAILED. Plan, requests and logs: {report.folder}"
    yield f"the same plan again: {replay_command(report)}"
    yield from (f"  {one.strike}{f'  ({one.note})' if one.note else ''}" for one in report.struck)
