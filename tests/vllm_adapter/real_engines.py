"""vLLM engines on the CPU, with the demo model in float32 and blocks of 32 tokens."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import AsyncIterator

import psutil

from connector.settings import ConnectorSettings
from engine.base import EngineOutput, EngineRequest, EngineStats, StepOutputs
from engine.embedded.settings import EngineSettings
from engine.vllm.client import VllmEngine
from engine.vllm.create import create_vllm_engine
from engine.vllm.settings import VllmSettings
from pdq.runtime.arguments import Arguments
from pdq.runtime.model import default_model_cache

MODEL = default_model_cache() / "smollm2-135m"
MAX_MODEL_LEN = 512
HELD = ConnectorSettings(kv_hold_s=36_000.0)
"""A prefill that nobody reads is freed because it is released, not because its time is over."""
ARGUMENTS = f"--dtype float32 --block-size 32 --max-num-seqs 8 --max-model-len {MAX_MODEL_LEN}"


def new_engine(arguments: str = ARGUMENTS, *, mode: str = "pull", role: str = "producer") -> VllmEngine:
    """Not started; 64 MiB of KV memory unless the arguments say otherwise."""
    return create_vllm_engine(
        VllmSettings(engine_args=Arguments.from_text(arguments), vllm_stop_s=3.0),
        EngineSettings(engine="vllm", engine_threads=1, kv_cache_bytes=64 << 20),
        HELD,
        model_path=MODEL,
        mode=mode,
        role=role,
        worker_id="worker-1",
        log_level="info",
        log_json=True,
    )


def engine_processes() -> list[psutil.Process]:
    """Of engines that this process started: cores and ranks."""
    found: list[psutil.Process] = []
    for child in multiprocessing.active_children():
        if "EngineCore" in child.name:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since the list was made
                core = psutil.Process(child.pid)
                found += [process for process in (core, *core.children(recursive=True)) if is_alive(process)]
    return found


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended: whoever adopted it has not asked for its exit code yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Reader:
    """Reads one engine's steps all the time, and hands out what came for a request."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.steps: list[StepOutputs] = []
        self.released: list[str] = []
        self.failure: Exception | None = None
        self._outputs: dict[str, list[EngineOutput]] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def until_end(self, engine_request_id: str) -> list[EngineOutput]:
        """All outputs, the last of which ends it. Raises what the engine's outputs raise."""
        return await self._until(lambda: self._ended(engine_request_id))

    async def until_released(self, engine_request_id: str) -> None:
        await self._until(lambda: engine_request_id in self.released or None)

    async def until_tokens(self, engine_request_id: str) -> None:
        await self._until(lambda: self._outputs.get(engine_request_id) or None)

    async def until_at_rest(self) -> EngineStats:
        """Of a step after which nothing runs, waits or is held."""

        def found() -> EngineStats | None:
            last = self.steps[-1].stats
            is_at_rest = last.free_blocks == last.total_blocks and last.running == last.waiting == last.pinned == 0
            return last if is_at_rest else None

        return await self._until(found)

    async def run(self, request: EngineRequest) -> list[EngineOutput]:
        await self.engine.submit(request)
        return await self.until_end(request.engine_request_id)

    def outputs_of(self, engine_request_id: str) -> list[EngineOutput]:
        return self._outputs.get(engine_request_id, [])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, engine_request_id: str) -> list[EngineOutput] | None:
        outputs = self._outputs.get(engine_request_id, [])
        return outputs if outputs and (outputs[-1].finish or outputs[-1].error) else None

    async def _until(self, found):
        async with asyncio.timeout(120):
            while (result := found()) is None:
                if self.failure is not None:
                    raise self.failure
                self._changed.clear()
                await self._changed.wait()
        return result

    async def _read(self) -> None:
        try:
            async for step in self._all():
                self.steps.append(step)
                self.released += step.released
                for output in step.outputs:
                    self._outputs.setdefault(output.engine_request_id, []).append(output)
                self._changed.set()
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            self.failure = error
            self._changed.set()

    def _all(self) -> AsyncIterator[StepOutputs]:
        return self.engine.outputs()
