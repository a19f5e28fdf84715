"""What the engine needs of a KV connector, and the connector of an engine that has none.

`connector.scheduler_half.SchedulerHalf` and `connector.worker_half.WorkerHalf` fit; their docstrings say what each
call means. The calls and their order are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from connector.step import StepMeta, TransferResults

NOTHING = TransferResults()


class SchedulerPort(Protocol):
    def on_new_request(
        self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int
    ) -> None: ...

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self) -> StepMeta: ...

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]: ...

    def release(self, engine_request_id: str) -> None: ...

    def update_connector_output(self, results: TransferResults) -> TransferResults: ...

    def take_gone(self) -> dict[str, str]: ...

    def has_pending_meta(self) -> bool: ...

    def shutdown(self) -> None: ...


class WorkerPort(Protocol):
    def handle_preemptions(self, meta: StepMeta) -> None: ...

    def bind_connector_metadata(self, meta: StepMeta) -> None: ...

    def start_load_kv(self) -> None: ...

    def wait_for_layer_load(self, layer: str) -> None: ...

    def save_kv_layer(self, layer: str) -> None: ...

    def wait_for_save(self) -> None: ...

    def clear_connector_metadata(self) -> None: ...

    def get_transfer_results(self) -> TransferResults: ...

    def hurry_releases(self, is_short: bool) -> None: ...

    def shutdown(self) -> None: ...


class NoScheduler:
    """No KV comes or goes."""

    _meta = StepMeta()

    def on_new_request(self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int) -> None:
        if kv_params:
            raise ValueError("this engine was started without a connector: it can only prefill and decode by itself")

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self) -> StepMeta:
        return self._meta

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        return False, None

    def release(self, engine_request_id: str) -> None:
        pass

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        return results

    def take_gone(self) -> dict[str, str]:
        return {}

    def has_pending_meta(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass


class NoWorker:
    """No KV comes or goes."""

    def handle_preemptions(self, meta: StepMeta) -> None:
        pass

    def bind_connector_metadata(self, meta: StepMeta) -> None:
        pass

    def start_load_kv(self) -> None:
        pass

    def wait_for_layer_load(self, layer: str) -> None:
        pass

    def save_kv_layer(self, layer: str) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def clear_connector_metadata(self) -> None:
        pass

    def get_transfer_results(self) -> TransferResults:
        return NOTHING

    def hurry_releases(self, is_short: bool) -> None:
        pass

    def shutdown(self) -> None:
        pass
