"""Push's laws under random events where P has more ranks than D: several writers per rank, spares, fences."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connector.side_channel import RecvReady
from connector.step import Push, Receive, Save, StopPush
from pdq.wire.types import pack_ids
from tests.connector.simulated_push import D_BLOCKS, P_BLOCKS, PAIR
from tests.connector.simulated_unequal_push import Prefill, Receiver, UnequalPushSimulation
from tests.event_sequences import many, some

SHAPES = [(2, 1, 2), (2, 1, 1), (4, 1, 2), (4, 2, 4), (4, 2, 1)]


class UnequalPush(UnequalPushSimulation, RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int, int]) -> None:
        self.set_up(*shape)

    # P's engine

    @rule(num_blocks=st.integers(1, 3))
    def begin_prefill(self, num_blocks: int) -> None:
        if len(self.p_free) < num_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        self.prefills[name] = Prefill(self.count, [self.p_free.pop(0) for _ in range(num_blocks)])
        push = Push(engine_request_id=name, transfer_id=name, pair=PAIR, num_tokens=16 * num_blocks, block_size=16)
        for p in self.p:
            p.pushes.expect(push, self.now)
        self.settle()

    @rule(pick=st.integers(0, 9))
    def compute(self, pick: int) -> None:
        """One chunk of one block on every rank; the last one ends the prefill."""
        running = [name for name, p in self.prefills.items() if not p.is_left]
        if not running:
            return
        name = running[pick % len(running)]
        prefill = self.prefills[name]
        index, block = prefill.num_computed, prefill.blocks[prefill.num_computed]
        prefill.num_computed += 1
        prefill.is_left = is_last = prefill.num_computed == len(prefill.blocks)
        for p in self.p:
            p.pushes.begin_step([Save(engine_request_id=name, block_ids=(block,), is_last=is_last)])
            for layer in range(2):
                p.memory |= dict(zip(p.addresses(block, layer), p.share(prefill.number, index, layer), strict=True))
                p.pushes.layer_saved(f"l{layer}", self.now)
                self.settle()
            p.pushes.end_step(self.now, self.now)
            if is_last:
                p.pushes.pushed(name, self.now)
        self.settle()

    @rule(pick=st.integers(0, 9))
    def preempt(self, pick: int) -> None:
        running = [name for name, p in self.prefills.items() if not p.is_left and p.num_computed]
        if not running:
            return
        name = running[pick % len(running)]
        prefill = self.prefills[name]
        for rank, p in enumerate(self.p):
            p.pushes.preempt([name])
            self.settle()
            for _ in range(99):
                if not p.pushes.is_quiet(name):
                    self.write(rank)
        self.free_p(prefill.blocks)
        prefill.blocks = [self.p_free.pop(0) for _ in prefill.blocks]
        prefill.num_computed = 0

    @rule(pick=st.integers(0, 9))
    def abort_or_release(self, pick: int) -> None:
        if self.prefills:
            name = sorted(self.prefills)[pick % len(self.prefills)]
            self.prefills[name].is_left = True
            for p in self.p:
                p.pushes.stop(StopPush(engine_request_id=name, reason="aborted", is_reported=True), self.now)
            self.settle()

    # D's engine

    @rule(pick=st.integers(0, 2), is_late=st.sampled_from([False, False, True]))
    def receive(self, pick: int, is_late: bool = False) -> None:
        """Of one of the last prefills, or of one that is yet to come. `is_late`: P hears of it before D's ranks."""
        number = self.count + 1 - pick
        name = f"r{number}"
        known = self.prefills.get(name)
        num_blocks = len(known.blocks) if known else 2
        if number < 1 or name in self.seen or len(self.d_free) < num_blocks:
            return
        self.seen.add(name)
        receiver = self.receivers[name] = Receiver(number, [self.d_free.pop(0) for _ in range(num_blocks)])
        ready = RecvReady(
            epoch="p-1",
            transfer_id=name,
            pair=PAIR,
            consumer="d-1",
            host="d",
            port=200,
            tp_size=self.decode_tp,
            block_size=16,
            num_tokens=16 * num_blocks,
            first_block=0,
            block_ids=pack_ids(receiver.blocks),
        )
        self.offers.start(name, self.source, ready, self.now, is_once=False)
        num_tokens = 16 * num_blocks
        self.unheard.append(
            Receive(engine_request_id=name, transfer_id=name, pair=PAIR, source=self.source, num_tokens=num_tokens)
        )
        if not is_late:
            self.step_of_d()
        self.settle()

    @rule()
    def step_of_d(self) -> None:
        """D's ranks hear of what its scheduler has told P."""
        while self.unheard:
            receive = self.unheard.pop(0)
            for d in self.d:
                d.receptions.start(receive, self.now)
        self.settle()

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        self.step_of_d()
        if self.receivers:
            name = sorted(self.receivers)[pick % len(self.receivers)]
            self.offers.stop(name)
            for d in self.d:
                d.receptions.cancel(name, self.now)
            self.settle()

    @rule(num_blocks=st.integers(1, 3))
    def start_both(self, num_blocks: int) -> None:
        self.begin_prefill(num_blocks)
        self.receive(1)
        self.talk()

    @rule(num_blocks=st.integers(1, 3), num_steps=st.integers(1, 12))
    def run_on(self, num_blocks: int, num_steps: int) -> None:
        """The usual way, as far as it goes."""
        self.start_both(num_blocks)
        for _ in range(num_steps):
            self.compute(0)
            for rank in range(self.prefill_tp):
                self.write(rank)
            self.talk()

    # The network and time

    @rule()
    def talk(self) -> None:
        for _ in range(200):
            if self.network:
                self.network.pop(0)()

    @rule(fate=st.sampled_from(["deliver", "deliver", "late", "drop", "repeat"]))
    def message(self, fate: str) -> None:
        if self.network:
            deliver = self.network[0] if fate == "repeat" else self.network.pop(0)
            if fate == "late":
                self.network.append(deliver)
            elif fate != "drop":
                deliver()

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    # Transports

    @rule(rank=st.integers(0, 3))
    def write(self, rank: int) -> None:
        """That rank's call in flight moves a byte, or fails: nobody is at that address any more."""
        p = self.p[rank % self.prefill_tp]
        if not p.jobs:
            return
        job = p.jobs[0]
        if job.generation != self.d[job.target].generation:
            self.break_off(p)
        elif job.pairs:
            local, remote = job.pairs.pop(0)
            self.land(job.target, p.memory[local], remote)
        if p.jobs and p.jobs[0] is job and not job.pairs:
            p.jobs.pop(0)
            p.pushes.written(job.action.job_id, job.action.push_id, self.now, self.now, self.now)
        self.settle()

    @rule(rank=st.integers(0, 3))
    def break_write(self, rank: int) -> None:
        p = self.p[rank % self.prefill_tp]
        if p.jobs:
            self.break_off(p)
            self.settle()

    @rule(rank=st.integers(0, 1))
    def land_late(self, rank: int) -> None:
        """A byte of a failed call arrives, unless D's rank has fenced."""
        rank %= self.decode_tp
        if self.d[rank].late:
            generation, value, remote = self.d[rank].late.pop(0)
            if generation == self.d[rank].generation:
                self.land(rank, value, remote)

    @rule(rank=st.integers(0, 1))
    def fence(self, rank: int) -> None:
        d = self.d[rank % self.decode_tp]
        if d.is_fence_wanted:
            d.is_fence_wanted = False
            d.generation += 1
            d.receptions.fenced(self.now)
            self.settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        assert sorted([b for p in self.prefills.values() for b in p.blocks] + self.p_free) == list(range(P_BLOCKS))
        assert sorted([b for r in self.receivers.values() for b in r.blocks] + self.d_free) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        if not hasattr(self, "p"):
            return
        for _ in range(400):
            self.now += 0.5
            self.step_of_d()
            self.talk()
            self.compute(0)
            for rank in range(self.prefill_tp):
                self.write(rank)
            for rank in range(self.decode_tp):
                self.fence(rank)
            self.settle()
            if not self.prefills and not self.receivers:
                break
        assert not self.prefills
        assert not self.receivers
        assert not any(p.jobs for p in self.p)


TestUnequalPush = some(UnequalPush, 150, num_steps=60)
test_ten_thousand_sequences = many(UnequalPush, num_steps=60)
