"""What no engine that is here can do is refused before it is queued."""

from __future__ import annotations

import pytest

from broker.base import WorkerRecord
from broker.membership import RegistryView
from gateway.capabilities import check_capabilities
from gateway.errors import GatewayError
from pdq.wire.types import FormatKind, OutputFormat, SamplingParams

ALL = "logprobs prompt_logprobs structured_outputs"
FORMAT = SamplingParams(max_tokens=1, output_format=OutputFormat(kind=FormatKind.JSON_OBJECT))


def worker(role: str, capabilities: str, *, state: str = "ready") -> WorkerRecord:
    return WorkerRecord(
        worker_id=f"{role}-{capabilities}-{state}",
        role=role,
        state=state,
        endpoint="",
        model="m",
        fingerprint="",
        capabilities=capabilities,
    )


def check(sampling: SamplingParams, *workers: WorkerRecord) -> None:
    view = RegistryView()
    view.workers = workers
    check_capabilities(sampling, view, field="response_format")


@pytest.mark.parametrize(
    ("sampling", "param", "role"),
    [
        (SamplingParams(max_tokens=1, logprobs=0), "logprobs", "decode"),
        (SamplingParams(max_tokens=1, prompt_logprobs=0), "prompt_logprobs", "prefill"),
        (FORMAT, "response_format", "decode"),
    ],
)
def test_the_role_that_must_have_it_is_asked(sampling: SamplingParams, param: str, role: str) -> None:
    other = "prefill" if role == "decode" else "decode"
    check(sampling, worker(role, ALL), worker(other, "else"))

    with pytest.raises(GatewayError) as caught:
        check(sampling, worker(role, "else"), worker(other, ALL))

    assert (caught.value.error_code, caught.value.param) == ("unsupported", param)
    assert role in caught.value.message


def test_one_that_can_is_enough_and_who_leaves_does_not_count() -> None:
    check(FORMAT, worker("decode", "logprobs"), worker("decode", ALL))

    with pytest.raises(GatewayError):
        check(FORMAT, worker("decode", "logprobs"), worker("decode", ALL, state="draining"))


def test_nobody_there_or_one_that_says_nothing_is_no_reason_to_refuse() -> None:
    check(FORMAT)
    check(FORMAT, worker("decode", ""))


def test_what_was_not_asked_for_nobody_needs_to_be_able_to() -> None:
    check(SamplingParams(max_tokens=1), worker("decode", "else"), worker("prefill", "else"))
