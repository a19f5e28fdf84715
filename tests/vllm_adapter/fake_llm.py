"""AsyncLLM as far as the adapter uses it, without vLLM: records what it is told, says what a test puts in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from engine.base import EngineError, StepOutputs
from engine.vllm.client import VllmEngine
from engine.vllm.launch import Started
from pdq.wire.types import Capability
from tests.vllm_adapter.core_outputs import output, step


class ValidationError(Exception):
    """As vLLM's, no ValueError."""


class PanicException(BaseException):
    """As of a library in Rust."""


class FakeLlm:
    """`engine_core`, `input_processor` and the way to the connector, in one."""

    def __init__(self) -> None:
        self.engine_core = self
        self.input_processor = self
        self.logger_manager = None
        self.requests: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.rejected: list[dict[str, Any]] = []
        self.is_dead = False
        self.is_hanging = False
        self._steps: asyncio.Queue[SimpleNamespace | Exception] = asyncio.Queue()
        self._is_step_out = False

    def say(self, *steps: SimpleNamespace) -> None:
        for one in steps:
            self._steps.put_nowait(one)

    def die(self, error: Exception) -> None:
        self.is_dead = True
        self._steps.put_nowait(error)

    async def heard(self) -> None:
        """Everything that was said has been worked through."""
        await self._steps.join()

    # Of vLLM.

    def process_inputs(self, request_id: str, prompt: Any, params: Any, **_: Any) -> SimpleNamespace:
        if params.get("structured_outputs") == {"regex": "(a"}:
            raise ValidationError("Grammar error: unclosed\ngroup")
        if params.get("structured_outputs") == {"regex": "panic"}:
            raise PanicException("explicit panic")
        if params.get("logprobs") == 99:
            raise ValidationError("Requested sample logprobs of 99")
        return SimpleNamespace(
            request_id=request_id, prompt_token_ids=prompt["prompt_token_ids"], params=params, external_req_id=None
        )

    async def add_request_async(self, request: SimpleNamespace) -> None:
        self._alive()
        self.requests.append(request)
        if request.request_id == "warm-up" and not self.is_hanging:
            self.say(step(), step(output(1, finish="length", request_id="warm-up")))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self._alive()
        self.aborted += request_ids

    async def notify_kv_transfer_request_rejected(self, *, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        self._alive()
        self.rejected.append({"id": request_id, **kv_transfer_params})

    async def get_output_async(self) -> SimpleNamespace:
        if self._is_step_out:
            self._steps.task_done()
            self._is_step_out = False
        said = await self._steps.get()
        self._is_step_out = True
        if isinstance(said, Exception):
            raise said
        return said

    def _alive(self) -> None:
        if self.is_dead:
            raise RuntimeError("EngineCore encountered an issue")


class FakeProcesses:
    """Also the files that they share."""

    def __init__(
        self,
        llm: FakeLlm,
        *,
        start_error: str = "",
        reason: str = "",
        capabilities: tuple[Capability, ...] = tuple(Capability),
    ) -> None:
        self._llm = llm
        self._capabilities = capabilities
        self._start_error = start_error
        self._reason = reason
        self.num_layers = 0

    async def start(self) -> Started:
        if self._start_error:
            raise EngineError(self._start_error)
        return Started(
            llm=self._llm,
            new_sampling_params=dict,
            block_size=32,
            total_blocks=100,
            max_model_len=2048,
            vocab_size=1000,
            eos_token_ids=frozenset({2}),
            capabilities=self._capabilities,
            fingerprint="block_size=32 vllm=0.32.0",
        )

    async def stop(self) -> None:
        pass

    def failure(self, otherwise: str) -> str:
        return self._reason or otherwise


def engine_over(processes: FakeProcesses, *, has_connector: bool = True, start_s: float = 60.0) -> VllmEngine:
    return VllmEngine(
        processes,
        processes,
        engine_id="w1",
        epoch="e1",
        host="127.0.0.1",
        side_channel_port=20001,
        tp_size=2,
        has_connector=has_connector,
        fingerprint={"mode": "pull", "weights": "abc"},
        start_s=start_s,
    )


async def next_step(engine: VllmEngine) -> StepOutputs:
    """The next one with news."""
    async for said in engine.outputs():
        if said.outputs or said.released:
            return said
    raise AssertionError("the outputs ended")


async def first_step(engine: VllmEngine) -> AsyncIterator[StepOutputs]:
    """One, with or without news."""
    async with contextlib.aclosing(engine.outputs()) as outputs:
        async for said in outputs:
            yield said
            return
