"""What no engine that is here can do is refused before it is queued."""

from __future__ import annotations

import pytest

from broker.base import WorkerRecord
from broker.membership import RegistryView
from gateway.capabilities import can_resume_exactly, check_capabilities
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


def test_any_of_them_may_get_the_request_but_for_who_leaves() -> None:
    check(FORMAT, worker("decode", ALL), worker("decode", "logprobs", state="draining"))

    with pytest.raises(GatewayError, match="decode-logprobs-ready"):
        check(FORMAT, worker("decode", ALL), worker("decode", "logprobs"))


def test_nobody_there_is_no_reason_to_refuse() -> None:
    check(FORMAT)


def test_a_worker_of_a_former_version_says_nothing_and_would_ignore_a_format() -> None:
    check(SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1), worker("decode", ""), worker("prefill", ""))

    with pytest.raises(GatewayError):
        check(FORMAT, worker("decode", ""))


def test_what_was_not_asked_for_nobody_needs_to_be_able_to() -> None:
    check(SamplingParams(max_tokens=1), worker("decode", "else"), worker("prefill", "else"))


def test_one_engine_that_rounds_otherwise_makes_every_resumption_approximate() -> None:
    view = RegistryView()
    view.workers = (worker("decode", f"{ALL} resume_exact"), worker("prefill", ALL))
    assert can_resume_exactly(view)

    view.workers = (*view.workers, worker("decode", ALL))
    assert not can_resume_exactly(view)
