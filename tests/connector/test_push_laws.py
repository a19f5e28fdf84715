"""The laws of connector/push_states.py under random events: one P rank, one D rank, calls that fail, bytes that land
late, a network that drops, repeats and delays. A P that is stopped is one whose messages wait while time goes on.
"""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.side_channel import RecvReady
from connector.step import Receive, Save, StopPush
from pdq.wire.types import pack_ids
from tests.connector.simulated_push import (
    D_BASE,
    D_BLOCKS,
    P_BASE,
    P_BLOCKS,
    PAIR,
    SOURCE,
    Prefill,
    PushSimulation,
    Receiver,
    addresses,
    content,
)


class Pushing(PushSimulation, RuleBasedStateMachine):
    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        PushSimulation.__init__(self)

    # P's engine

    @rule(num_blocks=st.integers(1, 3))
    def begin_prefill(self, num_blocks: int) -> None:
        if len(self.p_free) >= num_blocks:
            self.count += 1
            prefill = Prefill(self.count, num_blocks, [self.p_free.pop(0) for _ in range(num_blocks)])
            self.prefills[prefill.name] = prefill
            self.pushes.expect(prefill.push, self.now)
            self.settle()

    @rule(pick=st.integers(0, 99))
    def compute(self, pick: int) -> None:
        """One chunk of one block; the last one ends the prefill."""
        running = [p for p in self.prefills.values() if not p.is_left]
        if not running:
            return
        prefill = running[pick % len(running)]
        index, block = prefill.num_computed, prefill.blocks[prefill.num_computed]
        is_last = index + 1 == prefill.num_blocks
        self.pushes.begin_step([Save(engine_request_id=prefill.name, block_ids=(block,), is_last=is_last)])
        for layer, address in enumerate(addresses(P_BASE, block)):
            self.memory[address] = content(prefill.number, index, layer)
            self.pushes.layer_saved(f"l{layer}", self.now)
            self.settle()
        self.pushes.end_step(self.now, self.now)
        prefill.num_computed += 1
        if is_last:
            prefill.is_left = True
            self.pushes.pushed(prefill.name, self.now)
        self.settle()

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        running = [p for p in self.prefills.values() if not p.is_left and p.num_computed]
        if not running:
            return
        prefill = running[pick % len(running)]
        self.pushes.preempt([prefill.name])
        self.settle()
        for _ in range(99):
            if self.pushes.is_quiet(prefill.name):
                break
            self.write()
        self.free_p(prefill.blocks)
        prefill.blocks = [self.p_free.pop(0) for _ in prefill.blocks]
        prefill.num_computed = 0

    @rule(pick=st.integers(0, 99))
    def abort_or_release(self, pick: int) -> None:
        if self.prefills:
            prefill = list(self.prefills.values())[pick % len(self.prefills)]
            prefill.is_left = True
            self.pushes.stop(StopPush(engine_request_id=prefill.name, reason="aborted", is_reported=True), self.now)
            self.settle()

    # D's engine

    @rule(pick=st.integers(0, 2), first_block=st.integers(0, 1))
    def receive(self, pick: int, first_block: int) -> None:
        """Of one of the last prefills, or of one that is yet to come."""
        number = self.count + 1 - pick
        name = f"r{number}"
        known = self.prefills.get(name)
        num_blocks = known.num_blocks if known else 2
        if number < 1 or name in self.receivers or name in self.reported or len(self.d_free) < num_blocks:
            return
        first_block = min(first_block, num_blocks - 1)
        receiver = Receiver(number, [self.d_free.pop(0) for _ in range(num_blocks)], first_block)
        receiver.addresses = {a for block in receiver.blocks[first_block:] for a in addresses(D_BASE, block)}
        self.receivers[name] = receiver
        ready = RecvReady(
            epoch="p-1",
            transfer_id=name,
            pair=PAIR,
            consumer="d-1",
            host="d",
            port=9,
            tp_size=1,
            block_size=16,
            num_tokens=16 * num_blocks,
            first_block=first_block,
            block_ids=pack_ids(receiver.blocks[first_block:]),
        )
        self.offers.start(name, SOURCE, ready, self.now, is_once=False)
        self.receptions.start(
            Receive(engine_request_id=name, transfer_id=name, pair=PAIR, source=SOURCE, num_tokens=16 * num_blocks),
            self.now,
        )
        self.settle()

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.receivers:
            name = sorted(self.receivers)[pick % len(self.receivers)]
            self.offers.stop(name)
            self.receptions.cancel(name, self.now)
            self.settle()

    # The network and time

    @rule(num_blocks=st.integers(1, 3))
    def start_both(self, num_blocks: int) -> None:
        self.begin_prefill(num_blocks)
        self.receive(1, 0)
        self.talk()

    @rule()
    def talk(self) -> None:
        """All messages arrive."""
        for _ in range(6):
            for queue, hear in ((self.to_p, self.p_hears), (self.to_d, self.d_hears)):
                while queue:
                    hear(queue.pop(0))

    @rule(to_p=st.booleans(), fate=st.sampled_from(["deliver", "deliver", "late", "drop", "repeat"]))
    def message(self, to_p: bool, fate: str) -> None:
        queue, hear = (self.to_p, self.p_hears) if to_p else (self.to_d, self.d_hears)
        if queue:
            message = queue[0] if fate == "repeat" else queue.pop(0)
            if fate == "late":
                queue.append(message)
            elif fate != "drop":
                hear(message)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    # Transports

    @rule()
    def write(self) -> None:
        """P's call in flight moves a byte, or fails: nobody is at that address any more."""
        if not self.jobs:
            return
        job = self.jobs[0]
        if job.generation != self.generation:
            self.break_off(job)
        elif job.pairs:
            local, remote = job.pairs.pop(0)
            self.land(self.memory[local], remote)
        if self.jobs and self.jobs[0] is job and not job.pairs:
            self.jobs.pop(0)
            self.pushes.written(job.job_id, job.push_id, self.now, self.now, self.now)
        self.settle()

    @rule()
    def break_write(self) -> None:
        if self.jobs:
            self.break_off(self.jobs[0])
            self.settle()

    @rule()
    def land_late(self) -> None:
        """A byte of a failed call arrives, unless D has fenced."""
        if self.late:
            generation, value, remote = self.late.pop(0)
            if generation == self.generation:
                self.land(value, remote)

    @rule()
    def fence(self) -> None:
        if self.is_fence_wanted:
            self.is_fence_wanted = False
            self.generation += 1
            self.receptions.fenced(self.now)
            self.settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        assert sorted([b for p in self.prefills.values() for b in p.blocks] + self.p_free) == list(range(P_BLOCKS))
        assert sorted([b for r in self.receivers.values() for b in r.blocks] + self.d_free) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        for _ in range(400):
            self.now += 0.5
            self.talk()
            self.compute(0)
            self.write()
            self.fence()
            self.settle()
            if not self.prefills and not self.receivers:
                break
        assert not self.prefills
        assert not self.receivers
        assert not self.jobs


Pushing.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPushing = Pushing.TestCase
