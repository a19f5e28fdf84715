"""The adapter on a real engine, a prefill worker's with the pull connector. One engine: the order of tests counts."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from engine.base import EngineError, EngineOutput, EngineRequest, LoadKv, PrefillOnly
from engine.vllm.prometheus import VllmCollector
from pdq.wire.types import Pair, SamplingParams, pack_ids, unpack_ids
from tests.pipeline.harness import eventually
from tests.vllm_adapter.core_outputs import TICKET
from tests.vllm_adapter.real_engines import ARGUMENTS, MAX_MODEL_LEN, Reader, engine_processes, is_alive, new_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.timeout(900),
]
PROMPT = tuple(range(100, 140))
_names = (f"r{number}" for number in itertools.count())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(own_environment: None) -> AsyncIterator[Reader]:
    engine = new_engine(f"{ARGUMENTS} --distributed-executor-backend mp")  # with a rank in a process of its own
    await engine.start()
    reader = Reader(engine)
    yield reader
    await reader.close()
    await engine.stop()


def request(kv=None, *, prompt=PROMPT, generated=(), **sampling) -> EngineRequest:
    name = next(_names)
    return EngineRequest(
        engine_request_id=f"{name}:1:1",
        request_id=name,
        pair=Pair(gen=1, attempt=1),
        prompt_ids=pack_ids(prompt),
        generated_ids=pack_ids(generated),
        sampling=SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling)),
        kv=kv,
    )


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in unpack_ids(output.token_ids)]


async def test_tokens_stream_one_step_each_and_the_blocks_come_back(reader):
    asked = request()
    outputs = await reader.run(asked)

    assert [len(unpack_ids(output.token_ids)) for output in outputs] == [1] * 8
    assert [output.finish for output in outputs] == [None] * 7 + ["length"]
    await reader.until_released(asked.engine_request_id)


async def test_the_same_prompt_gives_the_same_tokens_and_is_found_in_the_prefix_cache(reader):
    prompt = tuple(range(300, 400))
    first = await reader.run(request(prompt=prompt))
    second = await reader.run(request(prompt=prompt))

    assert ids_of(first) == ids_of(second)
    assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, 96)


async def test_what_was_generated_before_is_continued_exactly(reader):
    whole = ids_of(await reader.run(request(max_tokens=10)))

    rest = await reader.run(request(generated=tuple(whole[:4]), max_tokens=10))

    assert ids_of(rest) == whole[4:]


async def test_several_requests_share_the_steps(reader):
    asked = [request(prompt=range(200 + n, 230 + n)) for n in range(4)]
    alone = [ids_of(await reader.run(request(prompt=range(200 + n, 230 + n)))) for n in range(4)]
    for one in asked:
        await reader.engine.submit(one)
    together = [ids_of(await reader.until_end(one.engine_request_id)) for one in asked]

    assert together == alone
    assert any(len(step.outputs) > 1 for step in reader.steps)


async def test_a_stop_token_ends_it_and_is_the_last_token(reader):
    whole = ids_of(await reader.run(request()))

    outputs = await reader.run(request(stop_token_ids=(whole[1],)))

    assert ids_of(outputs) == whole[:2]
    assert (outputs[-1].finish, outputs[-1].stop_token_id) == ("stop", whole[1])


async def test_fewer_tokens_than_the_least_do_not_stop(reader):
    whole = ids_of(await reader.run(request()))

    outputs = await reader.run(request(stop_token_ids=(whole[1],), min_tokens=5))

    assert len(ids_of(outputs)) >= 5


async def test_log_probabilities_name_the_chosen_token_and_the_best_ones(reader):
    outputs = await reader.run(request(logprobs=2, max_tokens=3))

    for output in outputs:
        (one,) = output.logprobs
        assert [one.token_id] == unpack_ids(output.token_ids)
        assert one.top_ids[0] == one.token_id  # greedy
        assert one.top_logprobs[0] == one.logprob > one.top_logprobs[1]


async def test_prompt_log_probabilities_have_one_entry_per_position(reader):
    outputs = await reader.run(request(prompt_logprobs=1, max_tokens=1))

    first, *rest = outputs[0].prompt_logprobs
    assert first is None
    assert [position.token_id for position in rest] == list(PROMPT[1:])
    assert all(len(position.top_ids) == 1 for position in rest)


async def test_a_sequence_ends_where_the_context_does(reader):
    prompt = tuple(range(500, 500 + MAX_MODEL_LEN - 3))

    outputs = await reader.run(request(prompt=prompt, max_tokens=50))

    assert (len(ids_of(outputs)), outputs[-1].finish) == (3, "length")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"prompt": range(MAX_MODEL_LEN + 1)}, "maximum model length"),
        ({"prompt": ()}, "empty"),
        ({"prompt": (49152,)}, "outside the vocabulary"),
        ({"logprobs": 1000}, "logprobs"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
async def test_what_can_not_be_served_is_refused_and_the_engine_goes_on(reader, bad, named):
    asked = request(**bad)

    (refused,) = await reader.run(asked)

    assert refused.error.startswith("engine_error: ")
    assert named in refused.error
    await reader.until_released(asked.engine_request_id)
    assert len(ids_of(await reader.run(request()))) == 8


async def test_an_aborted_request_ends_without_a_word_and_gives_its_blocks_back(reader):
    asked = request(max_tokens=400, ignore_eos=True)
    await reader.engine.submit(asked)
    await reader.until_tokens(asked.engine_request_id)
    await reader.engine.abort(asked.engine_request_id)
    num_outputs = len(reader.outputs_of(asked.engine_request_id))

    await reader.until_released(asked.engine_request_id)
    await reader.run(request())

    assert len(reader.outputs_of(asked.engine_request_id)) == num_outputs


async def test_a_prefill_is_pinned_until_it_is_released(reader):
    asked = request(PrefillOnly(), prompt_logprobs=0)
    (prefilled,) = await reader.run(asked)

    assert (prefilled.finish, prefilled.ticket.num_tokens, prefilled.ticket.block_size) == ("prefilled", 40, 32)
    assert len(unpack_ids(prefilled.ticket.block_ids)) == 2
    assert len(prefilled.prompt_logprobs) == 40
    assert reader.steps[-1].stats.pinned == 1
    assert asked.engine_request_id not in reader.released

    await reader.engine.release(asked.engine_request_id)
    await reader.until_released(asked.engine_request_id)


async def test_an_aborted_prefill_holds_nothing(reader):
    asked = request(PrefillOnly(), prompt=tuple(range(600, 1000)))
    await reader.engine.submit(asked)
    await reader.engine.abort(asked.engine_request_id)

    await reader.until_released(asked.engine_request_id)

    assert reader.outputs_of(asked.engine_request_id) == []


async def test_a_prefill_worker_that_is_asked_to_load_says_that_it_can_not(reader):
    asked = request(LoadKv(ticket=TICKET))

    (failed,) = await reader.run(asked)

    assert failed.error is not None
    await reader.until_released(asked.engine_request_id)


async def test_vllms_figures_can_be_scraped(reader):
    await reader.run(request())
    registry = CollectorRegistry()
    registry.register(VllmCollector())

    text = generate_latest(registry).decode()

    assert re.search(r"^vllm:prefix_cache_queries_total\{.*\} [1-9]", text, re.M), text
    assert "vllm:pdq_" in text


async def test_all_blocks_are_free_in_the_end(reader):
    await reader.run(request())
    await reader.until_at_rest()

    released = reader.released
    assert sorted(released) == sorted(set(released))


async def test_a_killed_engine_core_is_an_engine_error_and_nothing_stays_behind(reader):
    asked = request(max_tokens=400, ignore_eos=True)
    await reader.engine.submit(asked)
    await reader.until_tokens(asked.engine_request_id)
    core, *ranks = engine_processes()
    assert ranks
    core.send_signal(signal.SIGKILL)

    with pytest.raises(EngineError, match="vLLM's engine died"):
        await reader.until_end(asked.engine_request_id)
    with pytest.raises(EngineError):
        await reader.engine.submit(request())
    async with asyncio.timeout(60):
        await reader.engine.stop()

    async def left() -> str:  # a rank notices by itself that its core is gone
        return ", ".join(str(process.pid) for process in (core, *ranks) if is_alive(process))

    await eventually(left, limit_s=60.0, what="end of all processes")
