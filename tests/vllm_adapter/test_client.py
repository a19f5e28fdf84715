"""The Engine protocol over vLLM's engine core, with a core that says what the test wants."""

from __future__ import annotations

import asyncio

import pytest

from connector.params import params_from_ticket
from engine.base import EngineError, LoadKv, PrefillOnly, PushKv, ReceiveKv, StepOutputs
from engine.vllm.client import VllmEngine
from pdq.wire.types import unpack_ids
from tests.vllm_adapter.core_outputs import SOURCE, TICKET, output, request, step
from tests.vllm_adapter.fake_llm import FakeLlm, FakeProcesses, engine_over, first_step, next_step

ID = "r1:1:2"


async def test_prompt_and_generated_ids_go_to_vllm_as_one_prompt_under_our_id(engine, llm):
    await engine.submit(request(prompt=(1, 2), generated=(3,), max_tokens=5))

    (sent,) = llm.requests
    assert (sent.request_id, sent.external_req_id, sent.prompt_token_ids) == (ID, ID, [1, 2, 3])
    assert (sent.params["max_tokens"], sent.params["stop_token_ids"]) == (4, [2])


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        (PrefillOnly(), {"do_remote_decode": True}),
        (PushKv(), {"do_remote_decode": True, "pdq_push": True}),
        (LoadKv(ticket=TICKET), {"do_remote_prefill": True, "pdq_block_ids": [7, 8]}),
        (ReceiveKv(source=SOURCE), {"do_remote_prefill": True, "pdq_push": True, "pdq_engine_id": "p1"}),
    ],
)
async def test_the_connector_is_told_what_to_do_and_our_id(engine, llm, kv, expected):
    await engine.submit(request(kv))

    params = llm.requests[0].params["extra_args"]["kv_transfer_params"]
    assert params | expected == params
    assert params["pdq_engine_request_id"] == ID


async def test_steps_come_out_as_they_are_said(engine, llm):
    await engine.submit(request())
    llm.say(step(output(11), running=1, usage=0.25))

    said = await next_step(engine)

    assert [unpack_ids(one.token_ids) for one in said.outputs] == [[11]]
    assert (said.stats.running, said.stats.waiting, said.stats.total_blocks, said.stats.free_blocks) == (1, 0, 100, 75)


async def test_steps_that_the_reader_was_behind_are_joined(engine, llm):
    await engine.submit(request())
    llm.say(step(output(11)), step(output(12)))
    await llm.heard()

    said = await next_step(engine)

    assert [unpack_ids(one.token_ids) for one in said.outputs] == [[11], [12]]


async def test_an_engine_without_news_tells_its_state_all_the_same(engine, llm):
    async for said in engine.outputs():
        assert (said.outputs, said.released, said.stats.running) == ((), (), 0)
        break


async def test_each_step_is_progress_also_one_without_news(engine, llm):
    (before,) = [said.stats.step async for said in first_step(engine)]
    await engine.submit(request())
    llm.say(step(running=1), step(running=1), step(output(11), running=1))

    said = await next_step(engine)

    assert said.stats.step == before + 3


async def test_a_computed_layer_is_progress_inside_a_long_step(llm):
    processes = FakeProcesses(llm)
    engine = engine_over(processes)
    await engine.start()
    (before,) = [said.stats.step async for said in first_step(engine)]
    processes.num_layers = 7

    (later,) = [said.stats.step async for said in first_step(engine)]

    assert later == before + 7
    await engine.stop()


async def test_a_submitted_request_waits_before_vllm_has_said_a_word_of_it(engine):
    await engine.submit(request())

    (said,) = [said async for said in first_step(engine)]

    assert (said.stats.running, said.stats.waiting) == (0, 1)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request(prompt=(1, 1000)), "token id 1000 is outside the vocabulary of 1000"),
        (request(logprobs=99), "Requested sample logprobs of 99"),
        (request(generated=tuple(range(8))), "8 tokens are generated already"),
    ],
)
async def test_what_vllm_can_not_serve_is_an_error_output_and_nothing_stays(engine, llm, bad, named):
    await engine.submit(bad)

    said = await next_step(engine)

    assert said.outputs[0].error is not None
    assert said.outputs[0].error.startswith("engine_error: ")
    assert named in said.outputs[0].error
    assert said.released == (ID,)
    assert llm.requests == []


async def test_a_load_that_is_refused_lets_the_prefills_blocks_go(engine, llm):
    await engine.submit(request(LoadKv(ticket=TICKET), logprobs=99))

    (rejected,) = llm.rejected
    assert (rejected["do_remote_prefill"], rejected["pdq_transfer_id"]) == (True, "r1")


async def test_without_a_connector_no_kv_can_come(llm):
    engine = engine_over(FakeProcesses(llm), has_connector=False)
    await engine.start()
    await engine.submit(request(LoadKv(ticket=TICKET)))

    said = await next_step(engine)
    await engine.stop()

    assert said.outputs[0].error is not None
    assert "without a connector" in said.outputs[0].error


async def test_an_abort_reaches_vllm_once_and_frees_what_has_no_connector(engine, llm):
    await engine.submit(request())
    await engine.abort(ID)
    await engine.abort(ID)
    await engine.abort("unknown")

    said = await next_step(engine)

    assert llm.aborted == [ID]
    assert (said.outputs, said.released) == ((), (ID,))


async def prefilled(engine: VllmEngine, llm: FakeLlm) -> None:
    await engine.submit(request(PrefillOnly()))
    llm.say(step(output(9, finish="length", kv_transfer_params=params_from_ticket(TICKET))))
    assert (await next_step(engine)).outputs[0].ticket == TICKET


@pytest.mark.parametrize("ends", ["release", "abort"])
async def test_a_finished_prefill_is_released_through_the_connector(engine, llm, ends):
    await prefilled(engine, llm)

    await getattr(engine, ends)(ID)

    (rejected,) = llm.rejected
    del rejected["id"]
    assert rejected == {
        "pdq_release": True,
        "pdq_engine_request_id": ID,
        "pdq_transfer_id": "r1",
        "pdq_gen": 1,
        "pdq_attempt": 2,
    }
    llm.say(step(news={"released": [ID]}))
    assert (await next_step(engine)).released == (ID,)
    await engine.release(ID)
    assert len(llm.rejected) == 1


async def test_only_a_finished_prefill_is_released(engine, llm):
    await engine.submit(request(PrefillOnly()))
    await engine.release(ID)
    await engine.release("unknown")

    assert llm.rejected == []


async def test_a_prefill_that_ended_while_its_abort_was_on_its_way_is_released(engine, llm):
    await engine.submit(request(PrefillOnly()))
    await engine.abort(ID)
    llm.say(step(output(9, finish="length", kv_transfer_params=params_from_ticket(TICKET))))
    llm.say(step(news={"released": [ID]}))

    said = await next_step(engine)

    assert (said.outputs, said.released) == ((), (ID,))
    assert [rejected["pdq_engine_request_id"] for rejected in llm.rejected] == [ID]


async def test_a_pinned_prefill_is_counted_until_it_is_released(engine, llm):
    await prefilled(engine, llm)
    (said,) = [said async for said in first_step(engine)]
    assert (said.stats.pinned, said.stats.waiting) == (1, 0)

    llm.say(step(news={"released": [ID]}))

    assert (await next_step(engine)).stats.pinned == 0


async def test_a_connector_that_can_not_free_blocks_safely_ends_the_engine(engine, llm):
    llm.say(step(news={"fatal": "a writer is alive"}))

    with pytest.raises(EngineError, match="can't give KV blocks back safely: a writer is alive"):
        await next_step(engine)


async def test_the_death_of_the_engine_ends_the_outputs_after_what_it_said_before(llm):
    engine = engine_over(FakeProcesses(llm, reason="SystemError: killed"))
    await engine.start()
    await engine.submit(request())
    llm.say(step(output(11)))
    llm.die(RuntimeError("EngineCore died"))

    assert [unpack_ids(one.token_ids) for one in (await next_step(engine)).outputs] == [[11]]
    with pytest.raises(EngineError, match="vLLM's engine died: SystemError: killed"):
        await next_step(engine)
    with pytest.raises(EngineError, match="SystemError: killed"):
        await engine.submit(request(name="r2"))
    await engine.stop()


@pytest.mark.parametrize("call", ["submit", "abort", "release"])
async def test_a_core_that_takes_nothing_more_is_an_engine_error_before_its_death_is_told(engine, llm, call):
    await prefilled(engine, llm)
    await engine.submit(request(name="r2"))
    llm.is_dead = True
    calls = {
        "submit": lambda: engine.submit(request(name="r3")),
        "abort": lambda: engine.abort("r2:1:2"),
        "release": lambda: engine.release(ID),
    }

    with pytest.raises(EngineError, match="EngineCore encountered an issue"):
        await calls[call]()


async def test_the_outputs_end_with_the_stop(engine, llm):
    async def read() -> list[StepOutputs]:
        return [said async for said in engine.outputs()]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await engine.stop()
    await engine.stop()

    async with asyncio.timeout(40):
        await reading
    with pytest.raises(EngineError, match="not running"):
        await engine.submit(request())
