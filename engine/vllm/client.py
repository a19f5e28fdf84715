"""`engine.base.Engine` over vLLM's AsyncLLM, of which it uses what is below the output handler (ADR 13)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import structlog

from engine.base import EngineError, EngineInfo, EngineRequest, EngineStats, LoadKv, ReceiveKv, StepOutputs
from engine.kv_params import kv_params
from engine.vllm.core_request import Refusal, new_core_request
from engine.vllm.launch import Started
from engine.vllm.prometheus import StatsRecorder
from engine.vllm.requests import OpenRequests, State
from pdq.wire.types import KvSource, Pair, SamplingParams, pack_ids

_TELL_S: Final = 1.0
"""An engine without news says so this often."""
_WARM_UP_TOKENS: Final = 8
"""Less than a block: nothing of it stays in the prefix cache."""
_log = structlog.get_logger(__name__)


class Processes(Protocol):
    """`engine.vllm.processes.VllmProcesses`."""

    async def start(self) -> Started: ...

    async def stop(self) -> None: ...


class Files(Protocol):
    """`engine.vllm.shared_files.SharedFiles`."""

    def failure(self, otherwise: str) -> str: ...

    @property
    def num_layers(self) -> int: ...


class VllmEngine:
    """One engine. `start` once, then any task may submit, abort and release; one task reads `outputs`."""

    def __init__(
        self,
        processes: Processes,
        files: Files,
        *,
        engine_id: str,
        epoch: str,
        host: str,
        side_channel_port: int,
        tp_size: int,
        has_connector: bool,
        fingerprint: dict[str, str],
        start_s: float,
    ) -> None:
        """`fingerprint`: what counts beside what vLLM's configuration says. `start_s`: longest start, first step and
        all."""
        self._processes = processes
        self._files = files
        self._engine_id = engine_id
        self._source = (host, side_channel_port, tp_size)
        self._epoch = epoch
        self._has_connector = has_connector
        self._fingerprint = fingerprint
        self._start_s = start_s
        self._started: Started | None = None
        self._requests = OpenRequests()
        self._news = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._is_stopping = False
        self._numbers = itertools.count(1)
        self._recorder: StatsRecorder | None = None
        self._num_steps = 0
        self._num_running = 0
        self._kv_usage = 0.0

    async def start(self) -> EngineInfo:
        """Returns when vLLM is ready. Raises EngineError with its reason."""
        give_up = asyncio.get_running_loop().time() + self._start_s
        started = self._started = await self._processes.start()
        self._recorder = StatsRecorder(started.llm.logger_manager)
        try:
            async with asyncio.timeout_at(give_up):
                await self._warm_up(started)
        except TimeoutError as error:
            raise EngineError(f"vLLM made no first step within {self._start_s:g} s (vllm_start_s)") from error
        self._pump = asyncio.create_task(self._take_steps(started.llm.engine_core), name="vllm-steps")
        info = self._info(started)
        _log.info("engine_ready", total_blocks=info.total_blocks, fingerprint=info.fingerprint)
        return info

    async def submit(self, request: EngineRequest) -> None:
        """Raises EngineError when the engine is gone. What vLLM can't ever serve ends with an error output."""
        started = self._alive()
        if not self._requests.add(request):
            return
        params: dict[str, Any] | None = kv_params(request)
        try:
            core_request = new_core_request(started, request, params, has_connector=self._has_connector)
        except Refusal as refusal:
            self._requests.refuse(request.engine_request_id, str(refusal))
            self._news.set()
            if params is not None and isinstance(request.kv, LoadKv | ReceiveKv):
                await self._reject(params)  # P's blocks must not wait for a reader
            return
        with self._dead_as_engine_error():
            await started.llm.engine_core.add_request_async(core_request)

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """One item per step that had news, several joined when the reader was behind, and at least one a second."""
        while not self._is_stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TELL_S):
                    await self._news.wait()
            self._news.clear()
            news = self._requests.take_news()
            if self._failure is None or news.outputs or news.released:
                yield StepOutputs(outputs=news.outputs, released=news.released, stats=self._stats())
            if self._failure is not None and not self._is_stopping:
                raise EngineError(self._failure)

    async def abort(self, engine_request_id: str) -> None:
        """A finished prefill is released; unknown ids are left alone."""
        former = self._requests.abort(engine_request_id)
        if former is State.OPEN:
            self._news.set()
            with self._dead_as_engine_error():
                await self._alive().llm.engine_core.abort_requests_async([engine_request_id])
        elif former is State.ENDED:
            await self.release(engine_request_id)

    async def release(self, engine_request_id: str) -> None:
        """vLLM ignores the abort of a finished request: a request that ends at once tells the connector."""
        request = self._requests.finished_prefill(engine_request_id)
        if request is None:
            return
        await self._reject(
            {
                "pdq_release": True,
                "pdq_engine_request_id": engine_request_id,
                "pdq_transfer_id": request.request_id,
                "pdq_gen": request.pair.gen,
                "pdq_attempt": request.pair.attempt,
            }
        )

    async def stop(self) -> None:
        """Ends vLLM's processes; what they hold is dropped. Idempotent, also after a failed start."""
        self._is_stopping = True
        self._news.set()
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        self._started = None
        await self._processes.stop()

    async def _warm_up(self, started: Started) -> None:
        """The first step does what vLLM leaves for it: it took 12 s on a busy CPU, where 10 s count as stalled."""
        request = EngineRequest(
            engine_request_id="warm-up",
            request_id="warm-up",
            pair=Pair(gen=1, attempt=1),
            prompt_ids=pack_ids(range(_WARM_UP_TOKENS)),
            generated_ids=b"",
            sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
            kv=None,
        )
        core = started.llm.engine_core
        core_request = new_core_request(started, request, None, has_connector=self._has_connector)
        with self._dead_as_engine_error():
            await core.add_request_async(core_request)
            while not any(output.finish_reason is not None for output in (await core.get_output_async()).outputs):
                pass

    # Down to vLLM.

    async def _reject(self, params: dict[str, Any]) -> None:
        """The way of vLLM's API process to the connector beside the scheduler."""
        with self._dead_as_engine_error():
            await self._alive().llm.notify_kv_transfer_request_rejected(
                request_id=f"{self._engine_id}-{next(self._numbers)}", kv_transfer_params=params
            )

    def _alive(self) -> Started:
        if self._started is None or self._failure is not None:
            raise EngineError(self._failure or "the engine is not running")
        return self._started

    @contextlib.contextmanager
    def _dead_as_engine_error(self) -> Any:
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(self._failure or self._died(error)) from error

    # Up from vLLM.

    async def _take_steps(self, engine_core: Any) -> None:
        try:
            while True:
                await self._on_step(await engine_core.get_output_async())
        except EngineError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, no more steps come
            self._failure = "vLLM's engine died"  # also when its own words can't be read
            self._failure = self._died(error)
        self._news.set()

    async def _on_step(self, step: Any) -> None:
        """Each message of the engine core is one step's."""
        self._num_steps += 1
        news = None
        if (stats := step.scheduler_stats) is not None:
            self._num_running, self._kv_usage = stats.num_running_reqs, stats.kv_cache_usage
            news = stats.kv_connector_stats
            if self._recorder is not None:
                self._recorder.on_step(stats, has_outputs=bool(step.outputs), now=time.monotonic())
        self._requests.on_step(step.outputs, news)
        if self._requests.has_news:
            self._news.set()
        if news and (fatal := news.get("fatal")):
            raise EngineError(f"the connector can't give KV blocks back safely: {fatal}")
        for engine_request_id in self._requests.take_unwanted():
            await self.release(engine_request_id)

    def _died(self, error: Exception) -> str:
        return f"vLLM's engine died: {self._files.failure(str(error) or type(error).__name__)}"

    def _stats(self) -> EngineStats:
        assert self._started is not None
        total = self._started.total_blocks
        num_open, num_pinned = self._requests.counts()
        running = min(self._num_running, num_open)
        return EngineStats(
            step=self._num_steps + self._files.num_layers,  # a sign of progress, also inside a long step
            total_blocks=total,
            free_blocks=total - round(total * self._kv_usage),
            running=running,
            waiting=num_open - running,
            pinned=num_pinned,
            num_preemptions=self._requests.num_preemptions,
        )

    def _info(self, started: Started) -> EngineInfo:
        host, port, tp_size = self._source
        pairs = dict(pair.split("=", 1) for pair in started.fingerprint.split()) | self._fingerprint
        return EngineInfo(
            engine_id=self._engine_id,
            epoch=self._epoch,
            block_size=started.block_size,
            total_blocks=started.total_blocks,
            max_model_len=started.max_model_len,
            kv_source=KvSource(
                engine_id=self._engine_id,
                epoch=self._epoch,
                host=host,
                port=port,
                tp_size=tp_size,
                block_size=started.block_size,
            ),
            fingerprint=" ".join(f"{key}={value}" for key, value in sorted(pairs.items())),
            capabilities=started.capabilities,
        )
