"""The laws of connector/push_states.py under random events: one P rank and one D rank, which may die and come back,
calls that fail, bytes that land late, a network that drops, repeats, delays and falls silent. A stopped P is one whose
messages wait while time goes on.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.step import Receive, Save, StopPush
from connector.transfers import TransferKey
from pdq.wire.types import Pair
from tests.connector.simulated_push import (
    D_BASE,
    D_BLOCKS,
    P_BASE,
    P_BLOCKS,
    Prefill,
    PushSimulation,
    Receiver,
    addresses,
    content,
)
from tests.event_sequences import many, some


class Pushing(PushSimulation, RuleBasedStateMachine):
    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        PushSimulation.__init__(self)

    # P's engine

    @rule(num_blocks=st.integers(1, 3), is_retry=st.sampled_from([False, False, True]), pick=st.integers(0, 99))
    def begin_prefill(self, num_blocks: int, is_retry: bool = False, pick: int = 0) -> None:
        """`is_retry`: of a request whose last attempt may still be under way here or at D."""
        if len(self.p_free) < num_blocks:
            return
        self.count += 1
        is_awaited = f"r{self.count}" in self.receivers.keys() | self.reported
        if is_retry and self.keys and not is_awaited:
            transfer_id = self.keys[pick % len(self.keys) + 1].transfer_id
            last = max(key.pair.attempt for key in self.keys.values() if key.transfer_id == transfer_id)
            self.keys[self.count] = TransferKey(transfer_id=transfer_id, pair=Pair(gen=1, attempt=last + 1))
        key = self.key_of(self.count)
        prefill = Prefill(self.count, key, num_blocks, [self.p_free.pop(0) for _ in range(num_blocks)])
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

    rarely = st.sampled_from(["no"] * 10 + ["writing p"] * 4 + ["p", "d"])

    @rule(who=rarely)
    def restart(self, who: str) -> None:
        """What is on its way to the old process reaches the new one."""
        if who == "p" or (who == "writing p" and self.jobs):
            self.start_p()
        elif who == "d":
            self.start_d()
        self.settle()

    # D's engine

    @rule(
        pick=st.integers(0, 2),
        first_block=st.integers(0, 1),
        has_all=st.sampled_from([False, False, False, True]),
        is_late=st.sampled_from([False, False, True]),
    )
    def receive(self, pick: int, first_block: int, has_all: bool = False, is_late: bool = False) -> None:
        """Of one of the last prefills, or of one that is yet to come. `has_all`: D's own cache has what it needs.
        `is_late`: P hears of it before D's rank."""
        number = self.count + 1 - pick
        name = f"r{number}"
        known = self.prefills.get(name)
        num_blocks = known.num_blocks if known else 2
        if number < 1 or name in self.receivers or name in self.reported or len(self.d_free) < num_blocks:
            return
        if has_all:
            self.reported.add(name)
            self.offers.start(
                name, self.source, self.ready_of(number, num_blocks, num_blocks, []), self.now, is_once=True
            )
            self.settle()
            return
        first_block = min(first_block, num_blocks - 1)
        receiver = Receiver(number, [self.d_free.pop(0) for _ in range(num_blocks)], first_block)
        receiver.addresses = {a for block in receiver.blocks[first_block:] for a in addresses(D_BASE, block)}
        self.receivers[name] = receiver
        key, ready = self.key_of(number), self.ready_of(number, num_blocks, first_block, receiver.blocks[first_block:])
        self.offers.start(name, self.source, ready, self.now, is_once=False)
        self.unheard.append(
            Receive(
                engine_request_id=name,
                transfer_id=key.transfer_id,
                pair=key.pair,
                source=self.source,
                num_tokens=16 * num_blocks,
            )
        )
        if not is_late:
            self.step_of_d()
        self.settle()

    @rule()
    def step_of_d(self) -> None:
        """D's rank hears of what its scheduler has told P."""
        while self.unheard:
            self.receptions.start(self.unheard.pop(0), self.now)
        self.settle()

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        self.step_of_d()
        if self.receivers:
            name = sorted(self.receivers)[pick % len(self.receivers)]
            self.offers.stop(name)
            self.receptions.cancel(name, self.now)
            self.settle()

    # The network and time

    @rule(num_blocks=st.integers(1, 3), is_only_told=st.sampled_from([False, False, True]))
    def start_both(self, num_blocks: int, is_only_told: bool) -> None:
        """`is_only_told`: P hears of D's blocks, D hears nothing yet."""
        self.begin_prefill(num_blocks)
        self.receive(1, 0)
        while is_only_told and self.to_p:
            self.p_hears(self.to_p.pop(0))
        if not is_only_told:
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

    @rule()
    def silence(self) -> None:
        """Nothing passes, for as long as both sides ask in vain."""
        for _ in range(8):
            self.to_p.clear()
            self.to_d.clear()
            self.wait(0.6)

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
    def write_all(self) -> None:
        for _ in range(99):
            self.write()

    @rule(is_abort=st.booleans())
    def break_write(self, is_abort: bool) -> None:
        """`is_abort`: P's engine gives the request up at the same time."""
        if self.jobs:
            job = self.jobs[0]
            read = {local for local, _ in job.pairs}
            self.break_off(job)
            for index, prefill in enumerate(list(self.prefills.values())):
                if is_abort and read & {address for block in prefill.blocks for address in addresses(P_BASE, block)}:
                    self.abort_or_release(index)
                    break
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
        """The writing thread replaces the transport; the core hears of it later."""
        if self.is_fence_wanted:
            self.is_fence_wanted, self.is_fence_done = False, True
            self.generation += 1

    @rule()
    def hear_of_fence(self) -> None:
        if self.is_fence_done:
            self.is_fence_done = False
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
            self.step_of_d()
            self.talk()
            self.compute(0)
            self.write()
            self.fence()
            self.hear_of_fence()
            self.settle()
            if not self.prefills and not self.receivers:
                break
        assert not self.prefills
        assert not self.receivers
        assert not self.jobs


TestPushing = some(Pushing, 150, num_steps=60)
test_ten_thousand_sequences = many(Pushing, num_steps=60)
