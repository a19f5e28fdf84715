"""Random lives of many requests on small pools: the fake engines check every assertion of vLLM's, and every byte read.

Whatever happens, in the end all blocks are free, each request has ended and was released once, and what was generated
is what an engine generates that computes everything itself.
"""

from __future__ import annotations

import random
from types import ModuleType

import pytest

from tests.connector_plugin.pairs import PATIENT, Engines, continuation, engines

NUM_REQUESTS = 6
SHORT = PATIENT | {
    "kv_lease_s": 1.0,
    "kv_hold_s": 1.5,
    "kv_wait_s": 3.0,
    "kv_push_wait_s": 6.0,
    "kv_answer_tries": 8,
}
"""Times that run out are one more way to fail, and blocks of a failed read are free when P's lease ends."""
WEIGHTS = {"prefill": 3, "decode": 4, "turn": 30, "abort": 2, "release": 1, "break_calls": 1, "preempt": 1}


class Life:
    """One random sequence."""

    def __init__(self, pair: Engines, rng: random.Random, *, recompute: bool) -> None:
        self.pair, self.rng, self.recompute = pair, rng, recompute
        self.prompts: dict[str, list[int]] = {}
        self.pushed: set[str] = set()
        self.prefilled: set[str] = set()
        self.decoded: set[str] = set()
        self.disturbed: set[str] = set()

    def run(self) -> None:
        for index in range(NUM_REQUESTS):
            name = f"r{index}"
            shared = self.rng.choice([0, 8, 13])
            own = [self.rng.randrange(1000, 9000) for _ in range(self.rng.randrange(1, 26))]
            self.prompts[name] = list(range(100, 100 + shared)) + own
            if self.rng.random() < 0.5:
                self.pushed.add(name)
        names = list(WEIGHTS)
        for _ in range(120):
            event = self.rng.choices(names, [WEIGHTS[name] for name in names])[0]
            getattr(self, event)()
        for name in self.prompts:
            self._prefill(name)
            self._decode(name)
        self.pair.run(lambda: all(name in self.decoded or self._decode(name) for name in self.prompts))
        self.pair.run_until_idle()

    def check(self) -> None:
        for name, ids in self.prompts.items():
            end, reason = self.pair.end(f"d-{name}"), self.pair.d.news.get("failed", {}).get(f"d-{name}")
            if end is not None and end[0] == "FINISHED_ERROR":
                assert reason
                assert not self.recompute
            elif name not in self.disturbed:
                assert end == ("FINISHED_LENGTH_CAPPED", continuation(ids, 3)), (name, reason)
        self.pair.check_all_is_free()

    def turn(self) -> None:
        engine = self.rng.choice([self.pair.p, self.pair.d])
        if self.rng.random() < 0.1:
            engine.step(meanwhile=self.abort)
        else:
            engine.turn()

    def prefill(self) -> None:
        self._prefill(self.rng.choice(list(self.prompts)))

    def decode(self) -> None:
        self._decode(self.rng.choice(list(self.prompts)))

    def abort(self) -> None:
        name = self.rng.choice(list(self.prompts))
        side, engine = self.rng.choice([("p", self.pair.p), ("d", self.pair.d)])
        is_there = any(key.startswith(f"{side}-{name}/") for key in engine.scheduler.requests)
        if is_there:
            self.disturbed.add(name)
            self.pair.abort(engine, f"{side}-{name}")

    def release(self) -> None:
        name = self.rng.choice(list(self.prompts))
        if name in self.prefilled:
            self.disturbed.add(name)
            self.pair.release(name)

    def break_calls(self) -> None:
        """The next call of either side fails."""
        self.pair.d.ranks[0].transport.fail_reads += 1
        self.pair.p.ranks[0].transport.fail_writes += 1

    def preempt(self) -> None:
        self.rng.choice([self.pair.p, self.pair.d]).scheduler.preempt_all()

    def _prefill(self, name: str) -> None:
        if name not in self.prefilled:
            self.prefilled.add(name)
            self.pair.prefill(name, self.prompts[name], push=name in self.pushed)

    def _decode(self, name: str) -> bool:
        """False: not yet."""
        if name in self.decoded:
            return True
        end = self.pair.end(f"p-{name}")
        if name not in self.pushed and (end is None or end[0] == "FINISHED_ABORTED"):
            if end is None:
                return False
            self.decoded.add(name)  # there is nothing to read
            return True
        self.decoded.add(name)
        self.pair.decode(name, self.prompts[name], max_tokens=3, push=name in self.pushed)
        return True


both_policies = pytest.mark.parametrize("recompute", [False, True], ids=["fail", "recompute"])


@both_policies
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_leave_nothing_behind(plugin: ModuleType, seed: int, recompute: bool) -> None:
    live(plugin, seed, recompute)


@pytest.mark.long
@both_policies
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_lives_leave_nothing_behind(plugin: ModuleType, seed: int, recompute: bool) -> None:
    live(plugin, seed, recompute)


def live(plugin: ModuleType, seed: int, recompute: bool) -> None:
    rng = random.Random(seed * 2 + recompute)
    tp_sizes = rng.choice([(1, 1), (1, 1), (2, 2), (2, 1)])
    with engines(
        plugin,
        settings=SHORT,
        tp_sizes=tp_sizes,
        p_num_blocks=30,
        d_num_blocks=24,
        p_budget=rng.choice([5, 16]),
        recompute=recompute,
    ) as pair:
        life = Life(pair, rng, recompute=recompute)
        life.run()
        life.check()
