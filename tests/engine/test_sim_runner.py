"""The simulated device: its clock, its layers, its directives."""

from __future__ import annotations

import time
from dataclasses import replace

from engine.embedded.runner import Chunk, TokenSequence
from engine.embedded.sim_echo import Directives, read_directives
from engine.embedded.sim_runner import SimRunner
from pdq.wire.types import SamplingParams
from tests.engine.drive import SMALL


def sequence(num_tokens: int) -> TokenSequence:
    return TokenSequence(
        engine_request_id="a",
        token_ids=[7] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=10),
        block_ids=list(range(-(-num_tokens // 4))),
    )


def timed(runner: SimRunner, chunk: Chunk) -> tuple[float, list[str]]:
    hooks: list[str] = []
    started_s = time.perf_counter()
    runner.run([chunk], lambda i: hooks.append(f"before {i}"), lambda i: hooks.append(f"after {i}"))
    return time.perf_counter() - started_s, hooks


def test_a_prefill_chunk_takes_the_time_of_the_formula_and_calls_each_layers_hooks():
    runner = SimRunner(replace(SMALL, sim_prefill_ms=10, sim_prefill_token_ms=1, sim_prefill_square_ms=0.1))
    runner.allocate(8, 4)
    found = sequence(20)
    found.num_computed = 10

    seconds, hooks = timed(runner, Chunk(found, 10, True))

    assert seconds >= 0.010 + 0.010 + 0.0001 * (20**2 - 10**2)
    assert hooks == ["before 0", "after 0", "before 1", "after 1"]


def test_a_decode_takes_the_time_of_the_formula():
    runner = SimRunner(replace(SMALL, sim_decode_ms=10, sim_decode_sequence_ms=5, sim_decode_context_ms=1))
    runner.allocate(8, 4)
    found = sequence(20)
    found.num_computed = 19

    seconds, _ = timed(runner, Chunk(found, 1, True))

    assert seconds >= 0.010 + 0.005 + 0.019


def test_directives_stand_at_the_start_one_after_the_other():
    assert read_directives([256, *b"!eos=12 !slow=30 rest"]) == Directives(eos_after=12, slow_ms=30)
    assert read_directives(list(b"!crash now")) == Directives(is_crash=True)
    assert read_directives(list(b"say !eos=12 ")) == Directives()
    assert read_directives(list(b"!eos=12")) == Directives()


def test_engines_with_different_layouts_have_different_fingerprints():
    prints = [
        SimRunner(settings).fingerprint()
        for settings in (SMALL, replace(SMALL, sim_layers=4), replace(SMALL, sim_key="other"))
    ]

    assert len({str(sorted(pairs.items())) for pairs in prints}) == 3
