"""Settings of a gateway's own parts; the process's whole list is in `main.py`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """HTTP, limits and times."""

    http_host: str = field(default="127.0.0.1", metadata={"help": "address on which clients are served"})
    http_port: int = field(default=8000, metadata={"help": "port on which clients are served; 0: the system chooses"})
    api_key: str = field(default="", metadata={"help": "what clients must send as bearer token; empty: nothing"})
    local_max_tokens: int = field(
        default=128, metadata={"help": "shorter prompts are prefilled by the decode worker itself; 0: none"}
    )
    max_model_len: int = field(
        default=0,
        metadata={
            "help": "most tokens of prompt and answer; 0: what the model and the smallest worker of each role allow"
        },
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
    http_unread_s: float = field(
        default=60.0, metadata={"help": "a client that reads nothing of its answer for so long is disconnected"}
    )
    max_migrations: int = field(default=3, metadata={"help": "how often a request may move to another decode worker"})
    stall_s: float = field(
        default=10.0,
        metadata={"help": "a decode worker that owes tokens and makes no step, or is silent, counts as gone"},
    )
    owner_kv_wait_s: float = field(
        default=40.0, metadata={"help": "as stall-s, while a request's KV may still be on its way"}
    )
    owner_silence_s: float = field(
        default=2.5, metadata={"help": "a decode worker that owes tokens and is silent this long is probed"}
    )
    owner_check_s: float = field(default=0.5, metadata={"help": "pace of the look at decode workers"})
    silent_s: float = field(
        default=3.0,
        metadata={
            "help": "a decode worker that did not answer is asked last for so long; its registry key is gone then"
        },
    )
    lost_check_s: float = field(default=2.0, metadata={"help": "pace of the check that queued jobs still exist"})
    queue_metrics_s: float = field(default=5.0, metadata={"help": "pace at which the queue's depth is asked for"})
    queue_timeout_s: float = field(default=5.0, metadata={"help": "longest wait for one call to the queue"})
    tick_s: float = field(default=0.1, metadata={"help": "grain of deadlines and keep-alives"})

    def __post_init__(self) -> None:
        if min(self.tick_s, self.owner_check_s, self.lost_check_s, self.queue_timeout_s, self.request_deadline_s) <= 0:
            raise ValueError("tick_s, owner_check_s, lost_check_s, queue_timeout_s, request_deadline_s: above 0")
        if min(self.queue_metrics_s, self.http_unread_s) <= 0:
            raise ValueError("queue_metrics_s, http_unread_s: above 0")
        if min(self.max_model_len, self.max_migrations) < 0 or min(self.max_in_flight, self.max_queued) < 1:
            raise ValueError("max_model_len, max_migrations: at least 0; max_in_flight, max_queued: at least 1")
