"""What becomes of an output format that vLLM, or this engine, doesn't take."""

from __future__ import annotations

import pytest

from engine.base import LoadKv, PrefillOnly
from pdq.wire.types import Capability, FormatKind, OutputFormat
from tests.vllm_adapter.core_outputs import TICKET, request
from tests.vllm_adapter.fake_llm import FakeProcesses, engine_over, next_step

ID = "r1:1:2"


@pytest.mark.parametrize(("regex", "why"), [("(a", "Grammar error: unclosed group"), ("panic", "explicit panic")])
async def test_an_output_format_that_vllm_refuses_is_the_requests_fault(engine, llm, regex, why):
    await engine.submit(request(LoadKv(ticket=TICKET), output_format=OutputFormat(kind=FormatKind.REGEX, text=regex)))

    said = await next_step(engine)

    assert said.outputs[0].error == f"invalid_output_format: {why}"
    assert said.released == (ID,)
    assert llm.requests == []
    assert [rejected["pdq_transfer_id"] for rejected in llm.rejected] == ["r1"], "P's blocks wait for nobody"


async def test_what_vllm_refuses_without_the_format_too_is_not_the_formats_fault(engine):
    await engine.submit(request(logprobs=99, output_format=OutputFormat(kind=FormatKind.REGEX, text="a")))

    said = await next_step(engine)

    assert said.outputs[0].error == "engine_error: Requested sample logprobs of 99"


async def test_an_engine_without_a_tokenizer_takes_no_output_format_but_prefills_for_one(llm):
    engine = engine_over(FakeProcesses(llm, capabilities=(Capability.LOGPROBS,)))
    await engine.start()
    wanted = OutputFormat(kind=FormatKind.JSON_OBJECT)
    await engine.submit(request(output_format=wanted))

    said = await next_step(engine)
    await engine.submit(request(PrefillOnly(), name="r2", output_format=wanted))
    await engine.stop()

    assert said.outputs[0].error is not None
    assert said.outputs[0].error.startswith("unsupported: ")
    assert [sent.request_id for sent in llm.requests[1:]] == ["r2:1:2"]
