"""Can the workers that are here do what a request asks for? Pure."""

from __future__ import annotations

from typing import Final

from broker.base import WorkerRecord
from broker.membership import RegistryView
from gateway.errors import GatewayError
from pdq.wire.types import Capability, SamplingParams

_ROLE_OF: Final = {
    Capability.LOGPROBS: "decode",
    Capability.PROMPT_LOGPROBS: "prefill",
    Capability.STRUCTURED_OUTPUTS: "decode",
    Capability.RESUME_EXACT: "decode",
}
"""Who must have it: D samples each token that a client sees, P alone sees the prompt's logits."""
_BEFORE_THERE_WERE_ANY: Final = "logprobs prompt_logprobs"
"""A worker of a former version says nothing, and would ignore an output format."""


def check_capabilities(sampling: SamplingParams, view: RegistryView, *, field: str) -> None:
    """Raises GatewayError `unsupported` unless every ready worker of the role can: any of them may get the request.

    `field`: the request field that an output format came from.
    """
    wanted = {
        Capability.LOGPROBS: ("logprobs", sampling.logprobs),
        Capability.PROMPT_LOGPROBS: ("prompt_logprobs", sampling.prompt_logprobs),
        Capability.STRUCTURED_OUTPUTS: (field, sampling.output_format),
    }
    for capability, (param, value) in wanted.items():
        if value is None:
            continue
        if worker := _without(capability, view):
            message = (
                f"{param} is not supported: the engine of {worker.role} worker {worker.worker_id} has no {capability}"
            )
            raise GatewayError("unsupported", message, param=param)


def can_resume_exactly(view: RegistryView) -> bool:
    return _without(Capability.RESUME_EXACT, view) is None


def _without(capability: Capability, view: RegistryView) -> WorkerRecord | None:
    for worker in view.of_role(_ROLE_OF[capability]):
        if worker.state == "ready" and capability not in (worker.capabilities or _BEFORE_THERE_WERE_ANY).split():
            return worker
    return None
