"""How many random event sequences a state machine gets: some in each run, ten thousand in `make test-long`."""

from __future__ import annotations

import contextlib
import os
import unittest
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MANY = 10_000
MANY_LIMIT_S = 3600


def some(machine: type[RuleBasedStateMachine], num_sequences: int, *, num_steps: int) -> type[unittest.TestCase]:
    """The test of an ordinary run. A sequence has `num_steps` events at most."""
    case = machine.TestCase
    case.settings = _settings(num_sequences, num_steps)
    return case


def many(machine: type[RuleBasedStateMachine], *, num_steps: int) -> Callable[[], None]:
    """The test of a long run."""

    @pytest.mark.long
    @pytest.mark.timeout(MANY_LIMIT_S)
    def test() -> None:
        run_many(machine, num_steps=num_steps)

    return test


def run_many(machine: type[RuleBasedStateMachine], *, num_steps: int) -> None:
    num_sequences = 0

    class Counted(machine):  # type: ignore[misc, valid-type] # a class that is an argument
        def __init__(self) -> None:
            nonlocal num_sequences
            num_sequences += 1
            super().__init__()

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # what all these events log
        run_state_machine_as_test(Counted, settings=settings(_settings(MANY, num_steps), database=None))
    assert num_sequences >= MANY


def _settings(num_sequences: int, num_steps: int) -> settings:
    return settings(
        max_examples=num_sequences,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
