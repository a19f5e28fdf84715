"""Any order of arrivals, aborts, releases, steps and transfer ends: the laws that the scheduler keeps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.scheduler_rig import EOS, SETTINGS, Rig


class SchedulerMachine(RuleBasedStateMachine):
    """Each request is released once, ends once unless aborted, and no block that a peer may touch is ever free."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(replace(SETTINGS, num_blocks=12))
        self.names: list[str] = []
        self.aborted: set[str] = set()

    @rule(kind=st.sampled_from(["local", "prefill", "load"]), num_tokens=st.integers(1, 40), extra=st.integers(1, 12))
    def submit(self, kind: str, num_tokens: int, extra: int) -> None:
        name = f"r{len(self.names)}"
        self.names.append(name)
        if kind == "prefill":
            self.rig.prefill(name, num_tokens)
        else:
            getattr(self.rig, kind)(name, num_tokens, max_tokens=extra)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names))
        if self.rig.answers[name].end is None:
            self.aborted.add(name)
        self.rig.abort(name)

    @precondition(lambda self: self.rig.half.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.rig.scheduler.release(data.draw(st.sampled_from(sorted(self.rig.half.pinned))))

    @rule(token=st.sampled_from([5, 5, 5, EOS]))
    def step(self, token: int) -> None:
        self.rig.step(token)

    @precondition(lambda self: self.rig.half.loading)
    @rule(data=st.data(), is_failed=st.booleans())
    def end_load(self, data: st.DataObject, is_failed: bool) -> None:
        half = self.rig.half
        engine_request_id = data.draw(st.sampled_from(sorted(half.loading)))
        self.rig.transfers(
            half.loaded(failed={engine_request_id: "x"}) if is_failed else half.loaded(engine_request_id)
        )

    @precondition(lambda self: self.rig.half.pinned)
    @rule(data=st.data())
    def end_pin(self, data: st.DataObject) -> None:
        self.rig.transfers(self.rig.half.sent(data.draw(st.sampled_from(sorted(self.rig.half.pinned)))))

    @invariant()
    def blocks_that_a_peer_may_touch_are_held(self) -> None:
        half, pool = self.rig.half, self.rig.pool
        for block_ids in [*half.loading.values(), *half.pinned.values()]:
            assert all(pool.is_held(block_id) for block_id in block_ids)
        loading = Counter(block_id for block_ids in half.loading.values() for block_id in block_ids)
        written = {i for i in loading if loading[i] > 1}
        assert written <= {i for block_ids in half.loading.values() for i in block_ids[:-1]}  # shared prefixes only

    def teardown(self) -> None:
        half = self.rig.half
        for _ in range(40 * (len(self.names) + 1)):
            self.rig.transfers(half.sent(*half.pinned))
            self.rig.step(results=half.loaded(*half.loading))
        answers = self.rig.answers
        assert self.rig.pool.num_free == 12
        assert [answers[name].num_released for name in self.names] == [1] * len(self.names)
        assert all((answers[name].end is None) == (name in self.aborted) for name in self.names)
        assert not half.known
        assert not half.awaiting_second_call


SchedulerMachine.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = SchedulerMachine.TestCase
