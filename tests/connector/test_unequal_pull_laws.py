"""Pull's laws under random events where P has more ranks than D: several legs and spares, a network that loses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from connector.step import Expect, Load, StepMeta
from pdq.wire.types import KvTicket, pack_ids
from tests.connector.simulated import D_BLOCKS, P_BLOCKS, PAIR
from tests.connector.simulated_unequal_pull import Loading, Prefill, UnequalPullSimulation
from tests.event_sequences import many, some

SHAPES = [(2, 1, 2), (2, 1, 1), (4, 1, 2), (4, 2, 4), (4, 2, 2), (4, 2, 1)]


class UnequalPull(UnequalPullSimulation, RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int, int]) -> None:
        self.set_up(*shape)

    @rule(num_blocks=st.integers(1, 3))
    def prefill(self, num_blocks: int) -> None:
        """Computed on all ranks, which hear of its end one by one."""
        if len(self.p_free) < num_blocks:
            return
        self.count += 1
        name = f"r{self.count}"
        prefill = self.prefills[name] = Prefill(self.count, [self.p_free.pop(0) for _ in range(num_blocks)])
        for p in self.p:
            p.producer.apply(
                StepMeta(expected=(Expect(engine_request_id=name, transfer_id=name, pair=PAIR),)), self.now
            )
            for index, block in enumerate(prefill.blocks):
                p.memory |= dict(zip(p.addresses(block), p.share(self.count, index), strict=True))

    @rule(pick=st.integers(0, 9), how=st.sampled_from(["pin", "pin", "pin", "release"]))
    def pin_or_release(self, pick: int, how: str) -> None:
        found = [name for name, p in self.prefills.items() if p.is_pinned == (how == "release")]
        if found:
            name = found[pick % len(found)]
            self.prefills[name].is_pinned = True
            meta = StepMeta(pinned=(name,)) if how == "pin" else StepMeta(released=(name,))
            for p in self.p:
                p.producer.apply(meta, self.now)
            self.settle()

    @rule(pick=st.integers(0, 9))
    def load(self, pick: int) -> None:
        names = [name for name in self.prefills if name not in self.loading]
        if not names or len(self.d_free) < 3:
            return
        name = names[pick % len(names)]
        prefill = self.prefills[name]
        blocks = [self.d_free.pop(0) for _ in prefill.blocks]
        self.loading[name] = Loading(prefill.number, blocks)
        ticket = KvTicket(
            transfer_id=name,
            pair=PAIR,
            engine_id="p",
            epoch="p-1",
            host="p",
            port=7,
            tp_size=self.prefill_tp,
            block_size=16,
            num_tokens=16 * len(blocks),
            block_ids=pack_ids(prefill.blocks),
        )
        for d in self.d:
            d.loads.start(Load(engine_request_id=name, ticket=ticket, block_ids=tuple(blocks), first_block=0), self.now)
        self.settle()

    @rule(num_blocks=st.integers(1, 3))
    def hand_over(self, num_blocks: int) -> None:
        """The usual way, up to the reading."""
        self.prefill(num_blocks)
        self.pin_or_release(0, "pin")
        self.load(0)
        self.talk()

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        if self.loading:
            name = sorted(self.loading)[pick % len(self.loading)]
            for d in self.d:
                d.loads.cancel(name, self.now)
            self.settle()

    @rule()
    def talk(self) -> None:
        for _ in range(4):
            while self.to_p:
                self.p_hears(self.to_p.pop(0))
            while self.to_d:
                self.d_hears(self.to_d.pop(0))

    @rule(is_to_p=st.booleans(), fate=st.sampled_from(["deliver", "deliver", "late", "drop", "repeat"]))
    def message(self, is_to_p: bool, fate: str) -> None:
        queue, hear = (self.to_p, self.p_hears) if is_to_p else (self.to_d, self.d_hears)
        if queue:
            message = queue[0] if fate == "repeat" else queue.pop(0)
            if fate == "late":
                queue.append(message)  # type: ignore[arg-type]
            elif fate != "drop":
                hear(message)  # type: ignore[operator]

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(who=st.integers(0, 1))
    def copy(self, who: int) -> None:
        """One byte of the reading under way."""
        d = self.d[who % self.decode_tp]
        if not (reading := next(iter(d.readings), None)):
            return
        if reading.pairs:
            local, remote = reading.pairs.pop(0)
            d.memory[local] = self.p[reading.source].memory[remote]
        if reading.is_broken:
            return
        if reading.stop:
            d.readings.pop(0)
            d.loads.drained(reading.leg_id, self.now)
        elif not reading.pairs:
            d.readings.pop(0)
            d.loads.read(reading.leg_id, self.now)
        self.settle()

    @rule(who=st.integers(0, 1))
    def break_or_fence(self, who: int) -> None:
        d = self.d[who % self.decode_tp]
        if not d.readings:
            return
        if d.readings[0].is_broken:
            d.loads.fenced(d.readings.pop(0).leg_id, self.now)
        else:
            d.readings[0].is_broken = True
            d.loads.broken(d.readings[0].leg_id, "status -1", self.now)
        self.settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        assert sorted([b for p in self.prefills.values() for b in p.blocks] + self.p_free) == list(range(P_BLOCKS))
        assert sorted([b for x in self.loading.values() for b in x.blocks] + self.d_free) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        if not hasattr(self, "p"):
            return
        while any(not prefill.is_pinned for prefill in self.prefills.values()):
            self.pin_or_release(0, "pin")
        for _ in range(400):
            self.now += 0.5
            self.talk()
            for who, d in enumerate(self.d):
                if d.readings and d.readings[0].is_broken:
                    self.break_or_fence(who)
                self.copy(who)
            self.settle()
            if not self.prefills and not self.loading:
                break
        assert not self.prefills
        assert not self.loading
        assert all(not d.readings for d in self.d)


TestUnequalPull = some(UnequalPull, 150, num_steps=60)
test_ten_thousand_sequences = many(UnequalPull, num_steps=60)
