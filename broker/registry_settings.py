"""How long the registry believes a silent process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    registry_ttl_s: float = field(
        default=3.0, metadata={"help": "a process that is silent this long is left out of placement"}
    )
    registry_forget_s: float = field(
        default=3600.0, metadata={"help": "after this the last heartbeat of a silent process is deleted"}
    )

    def __post_init__(self) -> None:
        if not 0 < self.registry_ttl_s < self.registry_forget_s:
            raise ValueError("registry_ttl_s must be positive and below registry_forget_s")
