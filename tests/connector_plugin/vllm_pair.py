"""Two real vLLM engines with the plugin, in a process of their own that takes commands: one JSON object a line.

    python -m tests.connector_plugin.vllm_pair MODEL_DIR PORT PORT

Engine "a" fails requests whose load failed, "b" computes them itself. Both hand KV over and take it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any, Final

from tests.vllm.reference import ENGINE_ARGS, ENVIRON

POLICIES: Final = {"a": "fail", "b": "recompute"}


CONNECTOR: Final = {"kv_hold_s": 36_000.0, "kv_lease_s": 30.0, "kv_answer_tries": 30}
"""A machine with too much to do lets nobody count as dead. P frees what nobody reads when it is told, never by time."""


class BlockDigests:
    """vLLM mixes it into its workers: they can say what their blocks hold."""

    def block_digests(self) -> list[str]:
        from hashlib import blake2b

        layers = [layer.numpy() for layer in self.model_runner.kv_caches]  # type: ignore[attr-defined]
        digests = []
        for block in range(len(layers[0])):
            digest = blake2b(digest_size=16)
            for layer in layers:
                digest.update(layer[block].tobytes())
            digests.append(digest.hexdigest())
        return digests


class News:
    """What the connector's news come out as in the API process."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.engine = vllm_config.kv_transfer_config.engine_id

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        figures = FIGURES[self.engine]
        if iteration_stats is not None:
            figures["tokens"] += iteration_stats.num_generation_tokens
            figures["preemptions"] += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            figures["usage"] = scheduler_stats.kv_cache_usage
            if scheduler_stats.kv_connector_stats:
                NEWS[self.engine].append(scheduler_stats.kv_connector_stats)

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


NEWS: Final[dict[str, list[dict[str, Any]]]] = {name: [] for name in POLICIES}
FIGURES: Final[dict[str, dict[str, float]]] = {name: {"tokens": 0, "preemptions": 0, "usage": 0.0} for name in POLICIES}
"""Tokens generated so far; requests that were preempted and have gone on; share of blocks in use after a step."""
FACTS: Final[dict[str, Any]] = {}


class Engines:
    def __init__(self, model_dir: str, ports: dict[str, int]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engines: dict[str, Any] = {}
        for name, policy in POLICIES.items():
            kv_transfer = KVTransferConfig(
                kv_connector="PdqMooncakeLayerwiseConnector",
                kv_connector_module_path="connector.plugin",
                kv_role="kv_both",
                kv_port=ports[name],
                engine_id=name,
                kv_load_failure_policy=policy,  # type: ignore[arg-type]
                kv_connector_extra_config={"pdq_epoch": f"epoch-{name}", "pdq_connector": CONNECTOR},
            )
            arguments = AsyncEngineArgs(
                model=model_dir,
                kv_cache_memory_bytes=256 << 20,
                enable_prefix_caching=True,
                skip_tokenizer_init=True,
                worker_extension_cls="tests.connector_plugin.vllm_pair.BlockDigests",
                kv_transfer_config=kv_transfer,
                **ENGINE_ARGS,
            )
            self.engines[name] = AsyncLLM.from_engine_args(arguments, stat_loggers=[News])  # type: ignore[list-item]
            print(f"engine {name} has started", file=sys.stderr, flush=True)

    async def generate(
        self, engine: str, request_id: str, ids: list[int], kv: dict[str, Any] | None, **sampling: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": kv} if kv else None,
            **sampling,
        )
        outputs = [out async for out in self.engines[engine].generate({"prompt_token_ids": ids}, params, request_id)]
        output = outputs[-1]
        completion = output.outputs[0]
        return {
            "ids": list(completion.token_ids),
            "finish": completion.finish_reason,
            "kv": output.kv_transfer_params,
            "has_prompt_logprobs": output.prompt_logprobs is not None,
        }

    async def abort(self, engine: str, request_id: str) -> None:
        """vLLM ignores an id that it hasn't taken in yet."""
        while request_id not in self.engines[engine].output_processor.external_req_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self.engines[engine].abort(request_id)

    async def reject(self, engine: str, request_id: str, kv: dict[str, Any]) -> None:
        await self.engines[engine].notify_kv_transfer_request_rejected(request_id, kv)

    async def reset(self, engine: str, running: bool) -> bool:
        done: bool = await self.engines[engine].reset_prefix_cache(running)
        return done

    async def digests(self, engine: str) -> list[str]:
        (digests,) = await self.engines[engine].collective_rpc("block_digests")
        found: list[str] = digests
        return found

    async def news(self, engine: str) -> list[dict[str, Any]]:
        return NEWS[engine]

    async def figures(self, engine: str) -> dict[str, float]:
        return FIGURES[engine]

    async def facts_of_import(self) -> dict[str, Any]:
        return FACTS

    async def check_health(self, engine: str) -> None:
        await self.engines[engine].check_health()

    def shutdown(self) -> None:
        for engine in self.engines.values():
            engine.shutdown(timeout=0)


async def serve(engines: Engines) -> None:
    """Until standard input ends. Answers carry the command's number, and come in any order."""
    loop, tasks = asyncio.get_running_loop(), set()

    def answer(number: int, **values: Any) -> None:
        sys.stdout.write(json.dumps({"number": number, **values}) + "\n")
        sys.stdout.flush()

    async def run(number: int, command: str, arguments: dict[str, Any]) -> None:
        try:
            answer(number, result=await getattr(engines, command)(**arguments))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test has to see it
            answer(number, error=f"{type(error).__name__}: {error}")

    answer(0, result="ready")
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(run(**json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def look_at_the_import() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base  # noqa: F401 - what it starts is vLLM's

    num_threads = threading.active_count()
    from connector import plugin

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name("PdqMooncakeConnector")
    FACTS.update(
        mooncake="mooncake" in sys.modules,
        new_threads=threading.active_count() - num_threads,
        found=found is plugin.PdqMooncakeConnector,
    )


def main() -> None:
    os.environ.update(ENVIRON | {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"})
    model_dir, *ports = sys.argv[1:]
    look_at_the_import()

    async def start_and_serve() -> None:
        engines = Engines(model_dir, dict(zip(POLICIES, map(int, ports), strict=True)))
        try:
            await serve(engines)
        finally:
            engines.shutdown()

    asyncio.run(start_and_serve())


if __name__ == "__main__":
    main()
