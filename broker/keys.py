"""Every Redis key of pdq. All keys of one model share the hash tag `{model}`, so they live in one cluster slot.

| key | type | content |
|---|---|---|
| `pdq:models` | set | names of served models (the only key outside the models' slots) |
| `pdq:{m}:prefill` | stream | one entry per queued or running prefill, all readable: `id gen tokens priority mode tenant gateway gateway_id v traceparent due deadline` (the last two: ms, Redis time; decimals of due: order of arrival). Group `prefill`. XLEN = queued + running, XPENDING = running |
| `pdq:{m}:ready` | zset | entry ids that may be taken, score = due. ZCARD = queued |
| `pdq:{m}:job:<id>:<gen>` | string | packed PrefillJob. No TTL while live; gone with settle; a dead letter's stays `dead_payload_ttl_s` |
| `pdq:{m}:req:<id>:<gen>` | hash | `state attempt failures causes worker decode reason entry` and `enqueued taken settled due deadline` (ms, Redis time). State: `queued prefill`, then what settle said, or `cancelled`, or why the queue ended it (`DeadJob.reason`). TTL `req_ttl_s` from its end on |
| `pdq:{m}:tenants` | zset | tenants that are ahead of the clock, score = virtual time (ms) |
| `pdq:{m}:wake` | stream | at most one entry: jobs came back; wakes sleeping workers |
| `pdq:{m}:dead` | stream | dead letters: `id gen reason attempts worker error causes tokens tenant`; at most `max_dead_letters` |
| `pdq:{m}:clock` | hash | `last` time somebody reaped or beat, `since` when there was no gap (after a gap nobody is dead yet); `arrivals` counts enqueues |
| `pdq:{m}:config` | hash | what holds for every process of the model: `mode`. Set by the first one, TTL `registry_ttl_s` after the last one |
| `pdq:{m}:scale` | hash | a row per `pdq up` (`<host>:<run folder>`): the worker processes that it shall run, `prefill=3 decode=2`. TTL `registry_ttl_s` |
| `pdq:{m}:up:<name>` | hash | what a `pdq up` runs: `prefill decode` (ready), `starting draining pids problem wish`. TTL `registry_ttl_s` |
| `pdq:{m}:workers` | zset | worker ids, score = last heartbeat (ms, Redis time); also of processes that have left, for `registry_forget_s` |
| `pdq:{m}:worker:<id>` | hash | the worker's record; `drain` = 1 asks it to drain. TTL `registry_ttl_s` |
"""  # noqa: E501 - a table row is one line

from __future__ import annotations

from typing import Final

MODELS: Final = "pdq:models"
GROUP: Final = "prefill"


class Keys:
    """The keys of one model. Raises ValueError for a model name that can't be a hash tag."""

    def __init__(self, model: str) -> None:
        if not model or any(char in "{}" or char.isspace() for char in model):
            raise ValueError(f"model name {model!r} must not be empty nor contain braces or white space")
        self.prefix: Final = f"pdq:{{{model}}}:"
        self.stream: Final = self.prefix + "prefill"
        self.ready: Final = self.prefix + "ready"
        self.tenants: Final = self.prefix + "tenants"
        self.wake: Final = self.prefix + "wake"
        self.dead: Final = self.prefix + "dead"
        self.clock: Final = self.prefix + "clock"
        self.config: Final = self.prefix + "config"
        self.scale: Final = self.prefix + "scale"
        self.workers: Final = self.prefix + "workers"

    def job(self, request_id: str, gen: int) -> str:
        return f"{self.prefix}job:{request_id}:{gen}"

    def req(self, request_id: str, gen: int) -> str:
        return f"{self.prefix}req:{request_id}:{gen}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}worker:{worker_id}"

    def up(self, name: str) -> str:
        return f"{self.prefix}up:{name}"
