"""pdq over two vLLM engines on this machine, pull or push, for comparison with `vllm_upstream`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from benchmarks.token_stream import Streamed, greedy, stream
from pdq.cli.deployment import Deployment, DeploymentSettings
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import free_port

_CONNECTORS: Final = {"pull": "TimedPdqConnector", "push": "TimedPdqLayerwiseConnector"}


@dataclass(slots=True, kw_only=True)
class PdqPair:
    client: httpx.AsyncClient
    url: str
    model: str

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Streamed:
        """Greedy, through gateway, queue and both workers."""
        return await stream(self.client, self.url, greedy(self.model, prompt, max_tokens), **{"X-Pdq-Trace": "1"})


@contextlib.asynccontextmanager
async def running(
    folder: Path, model: str, mode: Literal["pull", "push"], engine_args: Sequence[str], environ: Mapping[str, str]
) -> AsyncIterator[PdqPair]:
    """One gateway, one prefill and one decode worker, an embedded Redis."""
    settings = DeploymentSettings(
        engine="vllm",
        model=ModelSettings(model=model, mode=mode),
        engine_args=shlex.join(engine_args),
        http_port=free_port(),
        run_dir=folder / f"pdq-{mode}",
        log_level="warning",
    )
    connector = f"benchmarks.timed_connectors:{_CONNECTORS[mode]}"
    own = {f"PDQ_{role}_WORKER__VLLM_CONNECTOR": connector for role in ("PREFILL", "DECODE")}
    async with Deployment(settings, environ={**environ, **own, "PDQ_GATEWAY__LOCAL_MAX_TOKENS": "0"}) as deployment:
        await deployment.wait_until_ready()
        async with httpx.AsyncClient(timeout=300) as client:
            yield PdqPair(client=client, url=settings.url, model=settings.served_model.name)
