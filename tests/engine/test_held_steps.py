"""Steps joined into one message say the same as the steps."""

from __future__ import annotations

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base import EngineOutput, EngineStats, StepOutputs
from engine.embedded.held_steps import HeldSteps
from engine.embedded.pipe import EnginePipe
from pdq.wire.types import TokenLogprob, pack_ids, unpack_ids


def stats(step: int) -> EngineStats:
    return EngineStats(step=step, total_blocks=9, free_blocks=9, running=0, waiting=0, pinned=0)


def step(number: int, *outputs: EngineOutput, released: tuple[str, ...] = ()) -> StepOutputs:
    return StepOutputs(outputs=outputs, released=released, stats=stats(number))


def token(name: str, token_id: int, finish: str | None = None) -> EngineOutput:
    return EngineOutput(engine_request_id=name, token_ids=pack_ids([token_id]), finish=finish)


def test_a_step_alone_comes_out_as_it_went_in():
    held = HeldSteps()
    only = step(3, token("a", 1), released=("b",))
    held.add(only)

    assert held.take() == only
    assert held.num_steps == 0


def test_tokens_logprobs_and_the_end_are_joined_per_request():
    held = HeldSteps()
    one, two = TokenLogprob(token_id=1, logprob=-1.0), TokenLogprob(token_id=2, logprob=-2.0)
    positions = (None, one)
    held.add(
        step(
            1,
            EngineOutput(engine_request_id="a", token_ids=pack_ids([1]), logprobs=(one,), prompt_logprobs=positions),
        )
    )
    held.add(step(2, EngineOutput(engine_request_id="a", token_ids=pack_ids([2]), logprobs=(two,), finish="length")))
    held.add(step(3, released=("a",)))

    joined = held.take()

    assert joined == step(
        3,
        EngineOutput(
            engine_request_id="a",
            token_ids=pack_ids([1, 2]),
            logprobs=(one, two),
            prompt_logprobs=positions,
            finish="length",
        ),
        released=("a",),
    )


def test_an_error_after_tokens_keeps_both():
    held = HeldSteps()
    held.add(step(1, token("a", 7)))
    held.add(step(2, EngineOutput(engine_request_id="a", error="engine_error: x"), released=("a",)))

    (output,) = held.take().outputs

    assert (unpack_ids(output.token_ids), output.error) == ([7], "engine_error: x")


@settings(max_examples=100)
@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=3), min_size=1, max_size=8))
def test_no_token_is_lost_doubled_or_moved(steps: list[list[tuple[str, int]]]):
    held = HeldSteps()
    for number, tokens in enumerate(steps):
        held.add(step(number, *(token(name, token_id) for name, token_id in tokens)))

    joined = held.take()

    assert joined.stats.step == len(steps) - 1
    for name in "abc":
        expected = [token_id for tokens in steps for who, token_id in tokens if who == name]
        got = [i for output in joined.outputs if output.engine_request_id == name for i in unpack_ids(output.token_ids)]
        assert got == expected
    assert len({output.engine_request_id for output in joined.outputs}) == len(joined.outputs)


def test_the_pipe_knows_whether_the_worker_has_taken_everything():
    mine, theirs = socket.socketpair()
    pipe = EnginePipe(mine)
    try:
        assert not pipe.is_behind()
        pipe.send(step(1, token("a", 1)))
        assert pipe.is_behind()
        theirs.recv(1 << 20)
        assert not pipe.is_behind()
    finally:
        pipe.close()
        theirs.close()
