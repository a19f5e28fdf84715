"""A prefill and a decode engine over one fabric, and requests that go through both."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from connector.memory_transport import MemoryFabric
from connector.params import PullProducer, PushConsumer, PushProducer, params_of
from pdq.wire.types import KvSource, Pair
from tests.connector_plugin.fake_engine import BLOCK_SIZE, FakeEngine
from tests.connector_plugin.fake_pool import next_token
from tests.connector_plugin.fake_scheduler import Request, Status
from tests.servers import free_ports

PATIENT: dict[str, Any] = {
    "kv_lease_s": 90.0,
    "kv_hold_s": 90.0,
    "kv_wait_s": 90.0,
    "kv_push_wait_s": 90.0,
    "kv_preempt_wait_s": 60.0,
    "kv_answer_s": 0.05,
    "kv_answer_tries": 1200,
    "kv_release_delay_s": 0.0,
}
"""Of both connectors: no time runs out before LIMIT_S does, so that a busy machine counts for nobody's death."""
LIMIT_S = 50.0
FIRST = Pair(gen=1, attempt=1)


class Engines:
    """P and D. Ids: `p-NAME` and `d-NAME` outside, with a suffix inside, as vLLM does it."""

    def __init__(self, plugin: ModuleType, *, tp_sizes: tuple[int, int] = (1, 1), **options: Any) -> None:
        """`options` of both engines; those that begin with p_ or d_ of one."""
        self.fabric = MemoryFabric()
        both = {key: value for key, value in options.items() if key[:2] not in ("p_", "d_")}
        made = []
        for name, role, tp_size in (("p", "kv_producer", tp_sizes[0]), ("d", "kv_consumer", tp_sizes[1])):
            own = {key[2:]: value for key, value in options.items() if key.startswith(f"{name}_")}
            values = {"settings": PATIENT, "role": role, "port": free_ports(tp_size), "tp_size": tp_size} | both | own
            made.append(FakeEngine(plugin, self.fabric, **values))
        self.p, self.d = made
        self._numbers = itertools.count(1)

    def prefill(self, name: str, ids: list[int], *, push: bool = False, **more: Any) -> None:
        producer = (PushProducer if push else PullProducer)(transfer_id=name, pair=FIRST)
        self._add(self.p, f"p-{name}", ids, 1, more.pop("params", params_of(producer)), **more)

    def decode_here(self, name: str, ids: list[int], *, max_tokens: int = 4) -> None:
        """At D, without P."""
        self._add(self.d, f"d-{name}", ids, max_tokens, {})

    def ticket(self, name: str) -> dict[str, Any]:
        """What P's engine answered."""
        ends = self.p.scheduler.ends
        return next(params for key, (_, _, params) in ends.items() if key.startswith(f"p-{name}/") and params)

    def decode(self, name: str, ids: list[int], *, max_tokens: int = 4, push: bool = False, **more: Any) -> None:
        if push:
            params = params_of(PushConsumer(transfer_id=name, pair=FIRST, source=self.source))
        else:
            params = more.pop("params", None) or self.ticket(name)
        self._add(self.d, f"d-{name}", ids, max_tokens, params, **more)

    @property
    def source(self) -> KvSource:
        config = self.p.config
        return KvSource(
            engine_id=config.kv_transfer_config.engine_id,
            epoch=self.p.epoch,
            host="127.0.0.1",
            port=config.kv_transfer_config.kv_port,
            tp_size=config.parallel_config.tensor_parallel_size,
            block_size=BLOCK_SIZE,
        )

    def release(self, name: str) -> None:
        """As `notify_kv_transfer_request_rejected` does it."""
        params = {"pdq_release": True, "pdq_engine_request_id": f"p-{name}"}
        request = Request(f"release-{next(self._numbers)}", [0], 1, params)
        self.p.scheduler.add(request, abort_immediately=True)

    def abort(self, engine: FakeEngine, outside_id: str) -> None:
        inside = [key for key in engine.scheduler.requests if key.startswith(f"{outside_id}/")]
        engine.scheduler.finish(inside, Status.FINISHED_ABORTED)

    def run(self, until: Callable[[], bool], *engines: FakeEngine) -> None:
        """Turns both engines' loops, or those given, until it holds."""
        deadline = time.monotonic() + LIMIT_S
        while not until():
            for engine in engines or (self.p, self.d):
                engine.turn()
            assert time.monotonic() < deadline, self.state()
            time.sleep(0.0005)

    def run_until_idle(self) -> None:
        self.run(lambda: not self.p.scheduler.has_requests() and not self.d.scheduler.has_requests())

    def end(self, outside_id: str) -> tuple[str, list[int]] | None:
        """(status, generated ids); None: it has not ended."""
        engine = self.p if outside_id.startswith("p-") else self.d
        ends = [value for key, value in engine.scheduler.ends.items() if key.startswith(f"{outside_id}/")]
        return (ends[-1][0], ends[-1][1]) if ends else None

    def state(self) -> str:
        return "; ".join(
            f"{name}: {[(key, request.status.name) for key, request in engine.scheduler.requests.items()]}"
            for name, engine in (("P", self.p), ("D", self.d))
        )

    def check_all_is_free(self) -> None:
        """Every block of both engines is back in its pool, and every request that ended was released once."""
        for engine in (self.p, self.d):
            pool = engine.scheduler.pool
            assert pool.num_free == pool.num_blocks - 1, self.state()
            ended = [key.partition("/")[0] for key in engine.scheduler.ends if not key.startswith("release")]
            assert sorted(engine.news.get("released", [])) == sorted(ended)

    def close(self) -> None:
        self.p.close()
        self.d.close()

    def _add(
        self, engine: FakeEngine, outside_id: str, ids: list[int], max_tokens: int, params: dict[str, Any], **more: Any
    ) -> None:
        is_rejected = more.pop("abort_immediately", False)
        params = {**params, "pdq_engine_request_id": outside_id}
        request = Request(f"{outside_id}/{next(self._numbers):08x}", list(ids), max_tokens, params, **more)
        engine.scheduler.add(request, abort_immediately=is_rejected)


@contextmanager
def engines(plugin: ModuleType, **options: Any) -> Iterator[Engines]:
    pair = Engines(plugin, **options)
    try:
        yield pair
    finally:
        pair.close()


def continuation(ids: list[int], num_tokens: int) -> list[int]:
    """What an engine generates that computes everything itself."""
    grown = list(ids)
    for _ in range(num_tokens):
        grown.append(next_token(grown))
    return grown[len(ids) :]
