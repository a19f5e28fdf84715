"""Real engine processes behind the Engine port: start, work, stop, and every way to die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from connector.settings import ConnectorSettings
from engine.base import EngineError, LoadKv, PrefillOnly
from engine.embedded.client import EmbeddedEngine
from engine.embedded.settings import EngineSettings
from tests.engine.drive import SMALL, Answers, request

pytestmark = pytest.mark.timeout(300)  # several processes start, on a machine that may be busy

TEXT = "The quick brown fox jumps over the lazy dog"
LIMIT_S = 90.0


class Running:
    """A started engine, and what it said so far."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.answers = Answers()
        self.stats = None
        self._outputs = engine.outputs()

    async def until(self, condition: Callable[[], bool]) -> Answers:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                step = await anext(self._outputs)
                self.answers.take(step)
                self.stats = step.stats
        return self.answers

    def is_at_rest(self) -> bool:
        return self.stats is not None and self.stats.free_blocks == self.stats.total_blocks


@pytest.fixture
async def start() -> AsyncIterator[Callable]:
    engines: list[EmbeddedEngine] = []

    async def start(settings: EngineSettings = SMALL, connector: ConnectorSettings | None = None, role: str = "both"):
        engine = EmbeddedEngine(settings, connector, role=role, engine_id=f"test-{role}", log_level="warning")
        engines.append(engine)
        await engine.start()
        return Running(engine)

    yield start
    for engine in engines:
        await engine.stop()


async def test_an_engine_starts_answers_and_stops(start):
    running = await start()
    await running.engine.submit(request("a", TEXT))

    answers = await running.until(lambda: running.answers["a"].end is not None and running.is_at_rest())
    await running.engine.stop()

    assert answers["a"].text == TEXT
    assert answers["a"].num_released == 1
    assert not psutil.pid_exists(running.engine.pid)
    with pytest.raises(StopAsyncIteration):
        await anext(running.engine.outputs())


async def test_an_idle_engine_gives_a_sign_of_life_each_second(start):
    running = await start()
    steps: set[int] = set()

    def has_moved() -> bool:
        if running.stats is not None:
            steps.add(running.stats.step)
        return len(steps) >= 3

    await running.until(has_moved)


async def test_start_up_errors_reach_the_caller(start):
    with pytest.raises(EngineError, match="must be a multiple of 8 for each of the 3 layers"):
        await start(replace(SMALL, sim_layers=3))


async def test_a_start_that_takes_too_long_is_given_up_and_leaves_no_process(start):
    engine = EmbeddedEngine(replace(SMALL, engine_start_s=0.001), None, role="both", engine_id="slow")

    with pytest.raises(EngineError, match=r"not ready after 0\.001 s"):
        await engine.start()

    assert not psutil.pid_exists(engine.pid)


async def test_a_killed_engine_ends_outputs_with_an_error_and_refuses_more(start):
    running = await start()
    os.kill(running.engine.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match="killed by signal 9"):
        await running.until(lambda: False)
    with pytest.raises(EngineError, match="not running"):
        await running.engine.submit(request("a", TEXT))


async def test_a_crashing_request_takes_the_engine_down(start):
    running = await start(replace(SMALL, sim_directives=True))
    await running.engine.submit(request("a", "!crash now"))

    with pytest.raises(EngineError, match="exit code 99"):
        await running.until(lambda: False)


async def test_signals_for_the_worker_do_not_end_the_engine(start):
    running = await start()
    os.kill(running.engine.pid, signal.SIGINT)
    os.kill(running.engine.pid, signal.SIGTERM)
    await running.engine.submit(request("a", TEXT))

    assert (await running.until(lambda: running.answers["a"].end is not None))["a"].text == TEXT


def test_the_engine_dies_with_its_parent():
    script = (
        "import asyncio, sys\n"
        "from engine.embedded.client import EmbeddedEngine\n"
        "from engine.embedded.settings import EngineSettings\n"
        "async def main():\n"
        "    engine = EmbeddedEngine(EngineSettings(num_blocks=8), None, role='both', engine_id='child')\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root
    ) as parent:
        line = next(text for text in parent.stdout if text.strip().isdigit())
        engine = psutil.Process(int(line))
        parent.kill()

    psutil.wait_procs([engine], timeout=LIMIT_S)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


async def test_ten_thousand_tokens_from_64_requests_at_once(start):
    running = await start(EngineSettings(num_blocks=2048))
    prompts = {f"r{i}": f"{i:03d}" + "x" * 125 for i in range(64)}
    for name, prompt in prompts.items():
        await running.engine.submit(request(name, prompt, max_tokens=160, ignore_eos=True))

    await running.until(lambda: len(running.answers) == 64 and all(answer.end for answer in running.answers.values()))

    assert {name: running.answers[name].text for name in prompts} == {
        name: (prompt * 2)[:160] for name, prompt in prompts.items()
    }


async def test_p_and_d_processes_over_mooncake(start):
    connector = ConnectorSettings(kv_lease_s=90.0, kv_wait_s=90.0, kv_answer_tries=120)
    p = await start(EngineSettings(num_blocks=256), connector, "producer")
    d = await start(EngineSettings(num_blocks=256), connector, "consumer")
    prompts = {f"r{i}": f"{i} {TEXT}" * (1 + 5 * i) for i in range(6)}
    for name, prompt in prompts.items():
        await p.engine.submit(request(name, prompt, kv=PrefillOnly()))
    await p.until(lambda: all(p.answers[name].end is not None for name in prompts))

    for name, prompt in prompts.items():
        await d.engine.submit(request(name, prompt, kv=LoadKv(ticket=p.answers[name].end.ticket)))
    await d.until(lambda: all(d.answers[name].end is not None for name in prompts) and d.is_at_rest())
    await p.until(p.is_at_rest)

    assert {name: d.answers[name].text for name in prompts} == prompts
    assert all(d.answers[name].end.transfer.num_bytes > 0 for name in prompts)
    assert [p.answers[name].num_released for name in prompts] == [1] * 6
