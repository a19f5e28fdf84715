"""The half beside the scheduler: which requests need KV, delayed frees, renewals until the worker half claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from connector.settings import ConnectorSettings
from connector.step import StepMeta, TransferResults

Role = Literal["producer", "consumer", "both"]


class SchedulerHalf:
    """Driven by the engine loop's thread, in vLLM's order. No method waits for the network."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        engine_id: str,
        epoch: str,
        host: str,
        side_channel_port: int,
        tp_size: int,
        block_size: int,
        role: Role,
        on_progress: Callable[[], None] | None = None,
    ) -> None:
        """`on_progress` is called from another thread when `take_gone` has something, so that an idle loop wakes."""
        raise NotImplementedError

    def on_new_request(self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int) -> None:
        """Raises ParamsError: the request is to be refused. D: renewals of P's lease start."""
        raise NotImplementedError

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens to be read from P beyond `num_computed_tokens`, load is asynchronous). No side effects."""
        raise NotImplementedError

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """`block_ids`: all blocks of the request, in order. 0 external tokens: P is told that nobody will read."""
        raise NotImplementedError

    def build_connector_meta(self) -> StepMeta:
        """Each step, also empty ones. Resets the queues."""
        raise NotImplementedError

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        """(True, KV params): keep the blocks until `finished_sending`. Finish: prefilled, stop, length, aborted, error.

        D: blocks of a request whose load is active stay allocated until its id is in `finished_recving`.
        """
        raise NotImplementedError

    def release(self, engine_request_id: str) -> None:
        """P: nobody will come for this finished prefill. Unknown ids are ignored."""
        raise NotImplementedError

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Before the engine frees blocks. Returns the results without ids that nobody waits for (dropped, counted)."""
        raise NotImplementedError

    def take_gone(self) -> dict[str, str]:
        """D: waiting requests whose KV P no longer has, with the reason; each once. Optional to ask:
        a load of such a request fails with the same reason."""
        raise NotImplementedError

    def has_pending_meta(self) -> bool:
        """True: a step is needed, also without a request to run, since `build_connector_meta` has something to say."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Idempotent."""
        raise NotImplementedError
