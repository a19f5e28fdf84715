"""vLLM's own disaggregated pair on this machine: two `vllm serve`, its MooncakeConnector over TCP, no router.

Its router sends both halves of a request at once. `ask` does that from the client's own process: a router at no cost.
`vllm serve` imports packages that pdq's vLLM does without:
    pip install --no-deps watchfiles prometheus-fastapi-instrumentator model-hosting-container-standards jmespath
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks.token_stream import Streamed, greedy, stream
from pdq.cli.children import BackOff, Child, stop_all
from pdq.runtime.ports import free_port

_START_LIMIT_S: Final = 900.0
_STOP_S: Final = 15.0
_MODEL: Final = "upstream"


@dataclass(slots=True, kw_only=True)
class UpstreamPair:
    client: httpx.AsyncClient
    prefill_url: str
    decode_url: str
    bootstrap_url: str
    engine_id: str

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Streamed:
        """Greedy. The prefill's own answer is awaited too."""
        body = greedy(_MODEL, prompt, max_tokens)
        transfer = {"transfer_id": secrets.token_hex(8)}
        at_prefill = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
        at_decode = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": self.bootstrap_url,
            **transfer,
        }
        prefill = asyncio.create_task(
            stream(self.client, self.prefill_url, {**body, "max_tokens": 1, "kv_transfer_params": at_prefill})
        )
        try:
            return await stream(self.client, self.decode_url, {**body, "kv_transfer_params": at_decode})
        finally:
            await prefill


@contextlib.asynccontextmanager
async def running(
    folder: Path, model_dir: Path, engine_args: Sequence[str], environ: Mapping[str, str]
) -> AsyncIterator[UpstreamPair]:
    """Started one after the other."""
    ports = {"kv_producer": free_port(), "kv_consumer": free_port()}
    bootstrap_url = f"http://127.0.0.1:{(bootstrap_port := free_port())}"
    children: list[Child] = []
    tasks: list[asyncio.Task[None]] = []
    try:
        async with httpx.AsyncClient(timeout=300) as client:
            for role, port in ports.items():
                kv = {
                    "kv_connector": "TimedMooncakeConnector",
                    "kv_connector_module_path": "benchmarks.timed_connectors",
                    "kv_role": role,
                    "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
                }
                serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)]
                own = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", _MODEL]
                child = Child(
                    f"upstream-{role}",
                    [*serve, *own, *engine_args, "--kv-transfer-config", json.dumps(kv)],
                    log_path=folder / f"upstream-{role}.log",
                    environ={**environ, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port)},
                    back_off=BackOff(min_s=3600, max_s=3600),
                    on_change=lambda _: None,
                )
                child.log_path.touch()
                children.append(child)
                tasks.append(asyncio.create_task(child.keep_running()))
                await _healthy(client, child, f"http://127.0.0.1:{port}")
            known = (await client.get(f"{bootstrap_url}/query")).json()
            yield UpstreamPair(
                client=client,
                prefill_url=f"http://127.0.0.1:{ports['kv_producer']}",
                decode_url=f"http://127.0.0.1:{ports['kv_consumer']}",
                bootstrap_url=bootstrap_url,
                engine_id=known["0"]["engine_id"],
            )
    finally:
        await stop_all(children, _STOP_S)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _healthy(client: httpx.AsyncClient, child: Child, url: str) -> None:
    try:
        async with asyncio.timeout(_START_LIMIT_S):
            while True:
                if child.restarts or child.state == "can't start":
                    raise RuntimeError(f"{child.name} {child.state}:\n{child.log_tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise RuntimeError(f"{child.name} did not start:\n{child.log_tail()}") from None
