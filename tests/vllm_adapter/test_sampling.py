"""pdq's sampling parameters as vLLM's: a request that moved counts what it has generated."""

from __future__ import annotations

import pytest

from engine.base import LoadKv, PrefillOnly, PushKv, ReceiveKv
from engine.vllm.sampling import sampling_arguments
from pdq.wire.types import FormatKind, OutputFormat
from tests.vllm_adapter.core_outputs import SOURCE, TICKET, request

EOS = frozenset({2, 5})


def arguments(kv=None, *, params=None, **more):
    return sampling_arguments(request(kv, **more), kv_params=params, eos_token_ids=EOS)


def test_every_value_reaches_vllm_under_its_name():
    given = {
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }

    made = arguments(**given)

    assert made == given | {
        "max_tokens": 8,
        "stop_token_ids": [2, 5],
        "ignore_eos": False,
        "structured_outputs": None,
        "detokenize": False,
    }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (OutputFormat(kind=FormatKind.JSON, text='{"type": "object"}'), {"json": '{"type": "object"}'}),
        (OutputFormat(kind=FormatKind.JSON_OBJECT), {"json_object": True}),
        (OutputFormat(kind=FormatKind.REGEX, text="a+"), {"regex": "a+"}),
        (OutputFormat(kind=FormatKind.CHOICE, text='["a", "b"]'), {"choice": ["a", "b"]}),
        (OutputFormat(kind=FormatKind.GRAMMAR, text='start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_an_output_format_rules_where_the_tokens_are_sampled_that_a_client_sees(wanted, expected):
    for kv in (None, LoadKv(ticket=TICKET), ReceiveKv(source=SOURCE)):
        assert arguments(kv, output_format=wanted)["structured_outputs"] == expected
    for kv in (PrefillOnly(), PushKv()):
        assert "structured_outputs" not in arguments(kv, output_format=wanted)


def test_no_top_k_is_zero_for_vllm():
    assert arguments(top_k=None)["top_k"] == 0


def test_tokens_generated_elsewhere_count():
    made = arguments(generated=(1, 2, 3), min_tokens=5)

    assert (made["max_tokens"], made["min_tokens"]) == (5, 2)


def test_more_generated_than_the_least_leaves_no_least():
    assert arguments(generated=(1, 2, 3), min_tokens=2)["min_tokens"] == 0


def test_nothing_left_to_generate_is_refused():
    with pytest.raises(ValueError, match="8 tokens are generated already and max_tokens is 8"):
        arguments(generated=tuple(range(8)))


def test_stop_tokens_join_the_models_own_unless_these_are_ignored():
    assert arguments(stop_token_ids=(9,))["stop_token_ids"] == [2, 5, 9]
    assert arguments(stop_token_ids=(9,), ignore_eos=True)["stop_token_ids"] == [9]


@pytest.mark.parametrize("kv", [PrefillOnly(), PushKv()])
def test_a_prefill_makes_one_token_that_can_not_stop_it_otherwise(kv):
    made = arguments(
        kv, params={"a": 1}, generated=tuple(range(8)), min_tokens=4, logprobs=3, prompt_logprobs=2, stop_token_ids=(9,)
    )

    assert made == {
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "prompt_logprobs": 2,
        "detokenize": False,
        "extra_args": {"kv_transfer_params": {"a": 1}},
    }


@pytest.mark.parametrize("kv", [LoadKv(ticket=TICKET), ReceiveKv(source=SOURCE)])
def test_a_decode_worker_asks_for_no_prompt_log_probabilities(kv):
    made = arguments(kv, params={"a": 1}, prompt_logprobs=2, logprobs=0)

    assert (made["prompt_logprobs"], made["logprobs"]) == (None, 0)
    assert made["extra_args"] == {"kv_transfer_params": {"a": 1}}
