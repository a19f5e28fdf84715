"""Times, limits and sizes of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """Equal on all workers of a model as far as the two sides meet (`kv_lease_s`)."""

    kv_lease_s: float = field(
        default=10.0, metadata={"help": "P keeps a prefill's blocks this long after the last sign of its reader"}
    )
    kv_hold_s: float = field(
        default=60.0, metadata={"help": "P keeps a prefill's blocks this long while no reader has shown up yet"}
    )
    kv_wait_s: float = field(
        default=30.0, metadata={"help": "D gives a KV transfer up this long after its blocks were allocated"}
    )
    kv_answer_s: float = field(
        default=0.5, metadata={"help": "a side-channel message without an answer is repeated after this time"}
    )
    kv_answer_tries: int = field(
        default=6, metadata={"help": "a side-channel message is sent this many times before its peer counts as gone"}
    )
    kv_direct_bytes: int = field(
        default=4 * 1024 * 1024,
        metadata={"help": "up to this size D reads at once, without CLAIM, from a P that answered a moment ago"},
    )
    kv_max_descriptors: int = field(
        default=512, metadata={"help": "most (local, remote, length) descriptors in one transport call"}
    )
    kv_batch_bytes: int = field(
        default=64 * 1024 * 1024, metadata={"help": "most bytes in one transport call; an abort waits for one call"}
    )
    kv_transport_timeout_s: int = field(
        default=5, metadata={"help": "the transport gives a stalled call up after this time (at least 5)"}
    )
    kv_release_delay_s: float = field(
        default=0.02,
        metadata={
            "help": "P learns this late, and of several at once, that blocks were read; at once when it is short"
        },
    )
    kv_quarantine_s: float = field(
        default=60.0,
        metadata={"help": "blocks of a failed read wait at most this long for a fence; then the worker must restart"},
    )
    side_channel_host: str = field(
        default="127.0.0.1", metadata={"help": "address that other workers reach this worker's connector at"}
    )
    side_channel_port: int = field(
        default=0, metadata={"help": "side-channel port of rank 0, rank r listens on port + r; 0 takes any free port"}
    )
