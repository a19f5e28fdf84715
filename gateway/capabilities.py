"""Can any worker that is here do what a request asks for? Pure."""

from __future__ import annotations

from typing import Final

from broker.membership import RegistryView
from gateway.errors import GatewayError
from pdq.wire.types import Capability, SamplingParams

_ROLE_OF: Final = {
    Capability.LOGPROBS: "decode",
    Capability.PROMPT_LOGPROBS: "prefill",
    Capability.STRUCTURED_OUTPUTS: "decode",
}
"""Who must have it: D samples each token that a client sees, P alone sees the prompt's logits."""


def check_capabilities(sampling: SamplingParams, view: RegistryView, *, field: str) -> None:
    """Raises GatewayError `unsupported`. A worker that doesn't say what it can do is taken to be able to.

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
        role = _ROLE_OF[capability]
        workers = [worker for worker in view.of_role(role) if worker.state == "ready"]
        if workers and not any(_can(worker.capabilities, capability) for worker in workers):
            message = f"{param} is not supported: the engines of this model's {role} workers have no {capability}"
            raise GatewayError("unsupported", message, param=param)


def _can(said: str, capability: Capability) -> bool:
    return not said or capability in said.split()
