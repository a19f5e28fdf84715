"""What pdq decides about a vLLM engine. Everything else is vLLM's own argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdq.runtime.arguments import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """vLLM's own arguments, and limits of starting it."""

    engine_args: Arguments = field(
        default=Arguments(),
        metadata={
            "help": "vllm: its engine arguments as `vllm serve` takes them, like '--block-size 32 --dtype float32'"
        },
    )
    vllm_start_s: float = field(
        default=1200.0, metadata={"help": "vllm: give an engine up that isn't ready after this time"}
    )
    vllm_stop_s: float = field(
        default=5.0, metadata={"help": "vllm: kill its processes when they haven't ended this time after stop"}
    )
    vllm_connector: str = field(
        default="",
        metadata={
            "help": "vllm: MODULE:CLASS of the KV connector, derived from one of pdq's; empty: pdq's for the mode"
        },
    )
    vllm_load_failure: Literal["fail", "recompute"] = field(
        default="fail",
        metadata={
            "help": "vllm, decode: a request whose KV didn't come is given back (fail) or its prompt computed here"
        },
    )

    def __post_init__(self) -> None:
        module, _, name = self.vllm_connector.partition(":")
        if self.vllm_connector and not (module and name.isidentifier()):
            raise ValueError(f"vllm_connector is {self.vllm_connector!r}, expected MODULE:CLASS")
