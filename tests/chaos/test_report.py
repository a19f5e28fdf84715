"""The tables of several runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.plan import Kind, Strike
from tests.chaos.recovery import Recovery
from tests.chaos.report import as_tables
from tests.chaos.run import Report
from tests.chaos.strikes import Struck
from tests.chaos.verdict import Fate, Verdict


def report(seed: int, *, is_good: bool) -> Report:
    verdict = Verdict(fates=Counter({Fate.RIGHT: 7, Fate.LEFT: 1, Fate.DEADLINE: 2, Fate.UNANSWERED: int(not is_good)}))
    verdict.say("I1 one end each", "", [] if is_good else ["1.1 has none"])
    verdict.say("I2 exact text", "")
    strike = Strike(number=1, at_s=1.0, kind=Kind.KILL, victim="decode-1")
    struck = Struck(strike=strike, at=1.0, until=2.0, had=frozenset())
    missed = Struck(strike=strike, at=2.0, until=2.0, had=frozenset(), note="was not there")
    recoveries = tuple(
        Recovery(kind="", victim="", at_s=1.0, request_id="", seconds=seconds, is_undisturbed=seconds < 2)
        for seconds in (1.0, 1.2, 3.0)
    )
    return Report(
        seed=seed,
        mode="push",
        seconds=60.0,
        kinds=frozenset(Kind),
        verdict=verdict,
        struck=(struck, missed),
        recoveries=recoveries,
        folder=Path(),
    )


def test_each_run_has_a_row_of_outcomes_and_a_column_of_strikes() -> None:
    lines = as_tables([report(1, is_good=True), report(2, is_good=False)]).splitlines()

    assert lines[2] == ("| push 1 | 10 | 7 | 1 | 2 | 0 | 0 | 1.2 / 3.0 / 3.0 (3) | 1.0 / 1.2 / 1.2 (2) | I1 I2 hold |")
    assert lines[3].endswith("| I2 hold, I1 BROKEN |")
    assert "| kill worker | 1 | 1 |" in lines
    assert lines[-1] == "| together | 1 | 1 |"
