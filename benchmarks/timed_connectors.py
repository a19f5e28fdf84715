"""Connectors that write down when each prefill ended. Loaded by vLLM by module path, for benchmarks only.

Both sides of a comparison get the same few microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

from benchmarks import prefill_times
from connector.plugin import PdqMooncakeConnector, PdqMooncakeLayerwiseConnector

if not torch.accelerator.is_available():
    # vLLM's connector asks which device it runs on, which raises on a CPU; it needs no more than a number.
    torch.accelerator.current_device_index = lambda: 0


class _Timed:
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """In the step that ended the request, right after its forward."""
        if request.max_tokens == 1:
            prefill_times.write(request.num_prompt_tokens)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc,no-any-return]


class TimedMooncakeConnector(_Timed, MooncakeConnector):
    """vLLM's own."""


class TimedPdqConnector(_Timed, PdqMooncakeConnector):
    """Pull."""


class TimedPdqLayerwiseConnector(_Timed, PdqMooncakeLayerwiseConnector):
    """Push."""
