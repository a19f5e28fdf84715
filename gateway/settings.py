"""Settings of a gateway process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """HTTP, model, limits and times. `model` and `served_model_name` are shared with the workers' settings by name."""

    http_host: str = field(default="0.0.0.0", metadata={"help": "address on which clients are served"})
    http_port: int = field(default=8000, metadata={"help": "port on which clients are served; 0: the system chooses"})
    api_key: str = field(default="", metadata={"help": "clients must send it as bearer token; empty: no key needed"})
    model: str = field(default="sim", metadata={"help": "model folder (its tokenizer and chat template), or `sim`"})
    served_model_name: str = field(
        default="", metadata={"help": "name that clients use; empty: the last part of --model"}
    )
    max_model_len: int | None = field(
        default=None, metadata={"help": "most tokens of prompt and answer; none: from the model's config, 32768 for sim"}
    )
    max_body_bytes: int = field(default=16 * 2**20, metadata={"help": "largest request body"})
    max_list_prompts: int = field(default=128, metadata={"help": "most prompts in one completion request"})
    max_in_flight: int = field(default=8192, metadata={"help": "requests of this gateway at once; more are a 429"})
    max_queued: int = field(
        default=4096, metadata={"help": "requests of this gateway that no decode worker has yet; more are a 429"}
    )
    request_deadline_s: float = field(default=600.0, metadata={"help": "longest life of a request; then 504"})
    sse_first_event_s: float = field(
        default=10.0, metadata={"help": "a stream's headers wait this long for the first event, so it can still fail"}
    )
    sse_keepalive_s: float = field(default=15.0, metadata={"help": "silence after which a stream gets a comment"})
    max_migrations: int = field(default=3, metadata={"help": "how often a request may move to another decode worker"})
    stall_s: float = field(
        default=10.0, metadata={"help": "a decode worker that owes tokens and makes no step, or is silent: gone"}
    )
    owner_kv_wait_s: float = field(
        default=40.0, metadata={"help": "as stall-s, while the request's KV may still be on its way"}
    )
    owner_silence_s: float = field(
        default=2.5, metadata={"help": "silence of a decode worker after which it is probed"}
    )
    lost_check_s: float = field(default=2.0, metadata={"help": "pace of the check that queued jobs still exist"})
    queue_timeout_s: float = field(default=5.0, metadata={"help": "longest wait for one call to the queue"})
    tick_s: float = field(default=0.1, metadata={"help": "grain of deadlines and keep-alives"})
    gateway_inbox_host: str = field(default="127.0.0.1", metadata={"help": "address of the ZeroMQ inbox for notices"})
    gateway_inbox_port: int = field(default=0, metadata={"help": "its port; 0: the system chooses"})
