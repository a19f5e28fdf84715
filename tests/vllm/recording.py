"""A connector that writes down what happens to KV blocks, and can hold a transfer up. vLLM loads it by module path.

One JSON object a line, in a file per process; times are of `time.monotonic`, which all processes of a machine share.

| event | where | says |
|---|---|---|
| `prefilled` | P, scheduler | `request` (the transfer id), `num_tokens`: a prefill has ended |
| `freed` | P, scheduler | `request`: nobody needs its blocks any more |
| `ended` | both, scheduler | `request`, `status`: vLLM's word for how |
| `preempted` | both, scheduler | `count` of requests in one step |
| `blocks` | both, worker | `side` (P: prefill ended; D: all KV is here), `request`, `digests` from block `first` on |
| `forward` | P, worker | a step with chunks to push has computed its last layer |
| `call` | the side that moves | `kind` read or write, `num_bytes`, `began_at`: one call of the transport |
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connector.mooncake import MooncakeTransport
from connector.plugin import GENERATION, PdqMooncakeLayerwiseConnector, PdqStep
from connector.vllm_plugin.fingerprint import fingerprint_of
from connector.vllm_plugin.settings import PluginSettings
from connector.vllm_plugin.worker import PluginWorker
from tests.vllm.records import FOLDER, HOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """To be digested: P when a prefill has ended, D when its load or receive has."""

    engine_request_id: str
    request: str
    block_ids: tuple[int, ...]
    """Those that are moved."""
    first: int
    is_received: bool


@dataclass
class RecordedStep(PdqStep):
    blocks: list[Blocks] = field(default_factory=list)


class Recorder:
    def __init__(self) -> None:
        folder = Path(os.environ[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}.jsonl"
        self.hold = folder / HOLD

    def write(self, event: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n")


class RecordingConnector(PdqMooncakeLayerwiseConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._recorder = Recorder()
        self._pending: list[Blocks] = []
        self._received: dict[str, Blocks] = {}
        self._sent: dict[str, str] = {}
        self._block_size = vllm_config.cache_config.block_size
        super().__init__(vllm_config, role, kv_cache_config)

    # Beside the scheduler.

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            first = (request.num_tokens - num_external_tokens) // self._block_size
            self._pending.append(self._blocks(request, blocks.get_block_ids()[0], first, is_received=True))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name = _transfer_of(request)
        self._recorder.write("ended", request=name, status=request.status.name)
        is_prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        if is_prefill and request.status.name == "FINISHED_LENGTH_CAPPED":
            self._recorder.write("prefilled", request=name, num_tokens=request.num_tokens)
            self._pending.append(self._blocks(request, block_ids[0], 0, is_received=False))
        is_kept, params = super().request_finished_all_groups(request, block_ids)
        if is_kept:
            self._sent[request.request_id] = name
        return is_kept, params

    def build_connector_meta(self, scheduler_output: Any) -> RecordedStep:
        if scheduler_output.preempted_req_ids:
            self._recorder.write("preempted", count=len(scheduler_output.preempted_req_ids))
        step = super().build_connector_meta(scheduler_output)
        pending, self._pending = self._pending, []
        return RecordedStep(step.step, pending)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for engine_request_id in connector_output.finished_sending or ():
            self._recorder.write("freed", request=self._sent.pop(engine_request_id))

    # Beside the KV memory.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv_caches = list(kv_caches.values())
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: RecordedStep) -> None:
        for blocks in connector_metadata.blocks:
            if blocks.is_received:
                self._received[blocks.engine_request_id] = blocks
            else:
                self._digest(blocks)
        self._has_saves = bool(connector_metadata.step.meta.saves)
        super().bind_connector_metadata(connector_metadata)

    def wait_for_save(self) -> None:
        if self._has_saves:
            self._recorder.write("forward")
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for engine_request_id in results.finished_recving:
            blocks = self._received.pop(engine_request_id, None)
            if blocks is not None and engine_request_id not in results.failed_recving:
                self._digest(blocks)
        return results

    def _blocks(self, request: Any, block_ids: Sequence[int], first: int, *, is_received: bool) -> Blocks:
        """Those that hold tokens of the prompt."""
        last = -(-request.num_prompt_tokens // self._block_size)
        return Blocks(
            engine_request_id=request.request_id,
            request=_transfer_of(request),
            block_ids=tuple(block_ids[first:last]),
            first=first,
            is_received=is_received,
        )

    def _digest(self, blocks: Blocks) -> None:
        digests = []
        for block_id in blocks.block_ids:
            digest = hashlib.blake2b(digest_size=8)
            for cache in self._kv_caches:
                digest.update(cache[block_id].contiguous().numpy().tobytes())
            digests.append(digest.hexdigest())
        side = "D" if blocks.is_received else "P"
        self._recorder.write("blocks", side=side, request=blocks.request, first=blocks.first, digests=digests)

    @classmethod
    def new_worker(cls, vllm_config: Any, settings: PluginSettings) -> PluginWorker:
        return PluginWorker(
            settings,
            GENERATION,
            rank=0,
            transport=RecordedTransport(timeout_s=settings.connector.kv_transport_timeout_s),
            fingerprint=fingerprint_of(vllm_config, block_size=settings.block_size),
        )


class RecordedTransport(MooncakeTransport):
    """While the file `hold` is there one call passes, and the next ones wait: a transfer that is under way."""

    def __init__(self, *, timeout_s: int) -> None:
        super().__init__(timeout_s=timeout_s)
        self._recorder = Recorder()
        self._num_held = 0

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        began_at = self._wait_while_held()
        super().read(peer, local, remote, lengths)
        self._recorder.write("call", kind="read", num_bytes=sum(lengths), began_at=began_at)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        began_at = self._wait_while_held()
        super().write(peer, local, remote, lengths)
        self._recorder.write("call", kind="write", num_bytes=sum(lengths), began_at=began_at)

    def _wait_while_held(self) -> float:
        while self._recorder.hold.exists() and self._num_held:
            time.sleep(0.01)
        self._num_held = int(self._recorder.hold.exists())
        return time.monotonic()


def _transfer_of(request: Any) -> str:
    """Equal at P and D."""
    params = request.kv_transfer_params or {}
    return f"{params.get('pdq_transfer_id')}:{params.get('pdq_gen')}:{params.get('pdq_attempt')}"
