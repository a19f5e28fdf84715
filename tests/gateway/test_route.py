"""Which way a prompt goes."""

from __future__ import annotations

import pytest

from gateway.route import Route, Way, choose_route
from pdq.wire.types import SamplingParams

PLAIN = SamplingParams(max_tokens=4)
SCORED = SamplingParams(max_tokens=4, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "sampling", "expected"),
    [
        (Way.PULL, 127, PLAIN, Route(Way.LOCAL, "short_prompt")),
        (Way.PULL, 128, PLAIN, Route(Way.PULL, "mode")),
        (Way.PUSH, 128, PLAIN, Route(Way.PUSH, "mode")),
        (Way.PUSH, 5, SCORED, Route(Way.PUSH, "mode")),
        (Way.LOCAL, 5000, PLAIN, Route(Way.LOCAL, "mode")),
        (Way.LOCAL, 5000, SCORED, Route(Way.PULL, "prompt_logprobs")),
    ],
)
def test_the_way_of_a_prompt(mode: Way, num_tokens: int, sampling: SamplingParams, expected: Route) -> None:
    assert expected == choose_route(mode, num_tokens=num_tokens, local_max_tokens=128, sampling=sampling)


def test_a_limit_of_zero_sends_nothing_to_decode_workers_directly() -> None:
    assert choose_route(Way.PULL, num_tokens=1, local_max_tokens=0, sampling=PLAIN) == Route(Way.PULL, "mode")
