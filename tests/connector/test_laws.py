"""The laws of connector/transfers.py under random events: one P rank that may die and come back, two D, transfers that
are tried again, reads that fail, a network that drops and repeats.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.step import Expect, StepMeta
from connector.transfers import Outcome, TransferKey
from pdq.wire.types import Pair
from tests.connector.simulated import D_BLOCKS, P_BLOCKS, Consumer, Loading, Prefill, PullSimulation
from tests.event_sequences import many, some


class Transfers(PullSimulation, RuleBasedStateMachine):
    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        PullSimulation.__init__(self)

    # P's engine

    @rule(num_blocks=st.integers(1, 3), is_retry=st.sampled_from([False, False, True]), pick=st.integers(0, 99))
    def begin_prefill(self, num_blocks: int, is_retry: bool = False, pick: int = 0) -> None:
        """`is_retry`: of a request whose last attempt may still be under way here or at D."""
        if len(self.free) < num_blocks:
            return
        self.count += 1
        names = sorted(self.attempts)
        transfer_id = names[pick % len(names)] if is_retry and names else f"r{self.count}"
        attempt = self.attempts[transfer_id] = self.attempts.get(transfer_id, 0) + 1
        self.newest = Prefill(
            number=self.count,
            key=TransferKey(transfer_id=transfer_id, pair=Pair(gen=1, attempt=attempt)),
            epoch=self.epoch,
            blocks=[self.free.pop(0) for _ in range(num_blocks)],
            content=[self.count * 10 + i for i in range(num_blocks)],
        )
        self.prefills[self.newest.name] = self.newest
        key = self.newest.key
        expect = Expect(engine_request_id=self.newest.name, transfer_id=key.transfer_id, pair=key.pair)
        self.apply(StepMeta(expected=(expect,)))

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["write", "pin", "pin", "abort"]))
    def go_on_with_prefill(self, pick: int, how: str) -> None:
        """Written: the ticket leaves. Pinned: the worker half hears of it."""
        open_ones = [p for p in self.prefills.values() if not (p.is_pinned if how == "pin" else p.is_written)]
        prefill = open_ones[pick % len(open_ones)] if open_ones else None
        if prefill is None:
            return
        if how == "write":
            self.write(prefill)
        elif how == "pin":
            self.pin(prefill)
        else:
            del self.prefills[prefill.name]
            self.free += prefill.blocks
            self.apply(StepMeta(forgotten=(prefill.name,)))

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        pinned = [p for p in self.prefills.values() if p.is_pinned]
        if pinned:
            self.apply(StepMeta(released=(pinned[pick % len(pinned)].name,)))

    @rule(how=st.sampled_from(["no", "no", "no", "no", "no", "no", "killed", "shut down"]))
    def restart(self, how: str) -> None:
        """What is on its way to the old process reaches the new one."""
        if how == "shut down":
            self.producer.abort_readers("P is shutting down")
        if how != "no":
            self.start_p()
            self.settle()

    # D's engines

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99))
    def arrive(self, who: int, pick: int) -> None:
        """The request is known, its blocks are not allocated yet."""
        d = self.consumers[who]
        prefill = self._pick(d, pick)
        if prefill is not None:
            d.waiting[prefill.name] = prefill
            d.renewals.start(prefill.name, prefill.ticket, self.now)
            self.settle()

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99), is_hit=st.booleans())
    def turn_away(self, who: int, pick: int, is_hit: bool = False) -> None:
        """Nothing will be read: aborted, or all of it was in D's own cache."""
        d = self.consumers[who]
        if d.waiting:
            name = sorted(d.waiting)[pick % len(d.waiting)]
            prefill = d.waiting.pop(name)
            d.renewals.stop(name)
            d.renewals.say_done(prefill.ticket, Outcome.OK if is_hit else Outcome.CANCELLED, "", self.now)
            self.settle()

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99), hit=st.booleans())
    def load(self, who: int, pick: int, hit: bool) -> None:
        """Of one that waits, or of one that has just come."""
        d = self.consumers[who]
        waiting = list(d.waiting.values())
        prefill = waiting[pick % len(waiting)] if waiting and pick % 2 else self._pick(d, pick)
        if prefill is not None and len(d.free) >= 3:
            self._load(who, prefill, hit)

    def _load(self, who: int, prefill: Prefill, hit: bool) -> None:
        d = self.consumers[who]
        d.waiting.pop(prefill.name, None)
        d.renewals.stop(prefill.name)
        blocks = [d.free.pop(0) for _ in prefill.blocks]
        d.loading[prefill.name] = Loading(prefill.content, blocks)
        first = 1 if hit and len(blocks) > 1 else 0
        for block, value in zip(blocks[:first], prefill.content, strict=False):
            d.memory[block] = value
        d.loads.start(self.load_of(prefill, blocks, first), self.now)
        self.settle()

    def _pick(self, d: Consumer, pick: int) -> Prefill | None:
        """By any ticket that ever left: its blocks may be freed, its P dead, and D may have loaded it before."""
        if not self.tickets:
            return None
        prefill = list(self.tickets.values())[-1 - pick % len(self.tickets)]
        return None if prefill.name in d.waiting.keys() | d.loading.keys() else prefill

    @rule(who=st.integers(0, 1), pick=st.integers(0, 99))
    def cancel(self, who: int, pick: int) -> None:
        d = self.consumers[who]
        if d.loading:
            d.loads.cancel(sorted(d.loading)[pick % len(d.loading)], self.now)
            self.settle()

    @rule(who=st.integers(0, 1), num_blocks=st.integers(1, 3), hit=st.booleans())
    def hand_over(self, who: int, num_blocks: int, hit: bool) -> None:
        """The usual way, up to the reading."""
        if len(self.free) >= num_blocks and len(self.consumers[who].free) >= 3:
            self.begin_prefill(num_blocks)
            self.pin(self.newest)
            self._load(who, self.newest, hit)
            self.talk(who)

    # The network and time

    @rule(who=st.integers(0, 1))
    def talk(self, who: int) -> None:
        self.talk_to(self.consumers[who])

    fates = st.sampled_from(["deliver", "deliver", "deliver", "drop", "repeat", "late"])

    @rule(who=st.integers(0, 1), is_to_p=st.booleans(), fate=fates)
    def message(self, who: int, is_to_p: bool, fate: str) -> None:
        d = self.consumers[who]
        queue = d.to_p if is_to_p else d.from_p
        if queue:
            message = queue[0] if fate == "repeat" else queue.pop(0)
            if fate == "late":
                queue.append(message)  # type: ignore[arg-type]
            elif fate != "drop":
                (self.p_hears if is_to_p else self.d_hears)(d, message)  # type: ignore[arg-type]

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    # D's transports: one reading at a time

    @rule(who=st.integers(0, 1))
    def copy(self, who: int) -> None:
        d = self.consumers[who]
        if not (reading := next(iter(d.readings), None)):
            return
        if reading.source != self.transport and reading.pairs:  # that process is gone
            self.break_read(who)
            return
        if reading.pairs:
            local, remote = reading.pairs.pop(0)
            d.memory[local] = self.memory[remote]
        if reading.is_broken:
            return
        if not reading.pairs:  # also of one that was stopped, when its last call had begun
            d.readings.pop(0)
            d.loads.read(reading.leg_id, self.now)
        elif reading.stop:
            d.readings.pop(0)
            d.loads.drained(reading.leg_id, self.now)
        self.settle()

    @rule(who=st.integers(0, 1))
    def read_all(self, who: int) -> None:
        for _ in range(4):
            self.copy(who)
            self.talk(who)

    @rule(who=st.integers(0, 1), is_peer_lost=st.booleans())
    def break_read(self, who: int, is_peer_lost: bool = True) -> None:
        d = self.consumers[who]
        if d.readings and not d.readings[0].is_broken:
            d.readings[0].is_broken = True
            d.loads.broken(d.readings[0].leg_id, "status -1", self.now, is_peer_lost=is_peer_lost)
            self.settle()

    @rule(who=st.integers(0, 1))
    def fence(self, who: int) -> None:
        d = self.consumers[who]
        if d.readings and d.readings[0].is_broken:
            reading = d.readings.pop(0)
            d.loads.fenced(reading.leg_id, self.now)
            self.settle()

    @invariant()
    def blocks_are_owned_once(self) -> None:
        owned = [block for p in self.prefills.values() for block in p.blocks] + self.free
        assert sorted(owned) == list(range(P_BLOCKS))
        for d in self.consumers:
            owned = [block for loading in d.loading.values() for block in loading.blocks] + d.free
            assert sorted(owned) == list(range(D_BLOCKS))

    def teardown(self) -> None:
        """Whatever happened: when all is delivered and all deadlines are over, nothing is left."""
        for prefill in [p for p in self.prefills.values() if not p.is_pinned]:
            self.pin(prefill)
        for who, d in enumerate(self.consumers):
            while d.waiting:
                self.turn_away(who, 0)
        for _ in range(400):
            self.now += 0.5
            for who, d in enumerate(self.consumers):
                self.talk(who)
                if d.readings and d.readings[0].is_broken:
                    self.fence(who)
                self.copy(who)
            self.settle()
            if not self.prefills and not any(d.loading for d in self.consumers):
                break
        assert not self.prefills
        assert len(self.freed) == len(set(self.freed))
        assert all(not d.loading and not d.readings for d in self.consumers)


TestTransfers = some(Transfers, 150, num_steps=60)
test_ten_thousand_sequences = many(Transfers, num_steps=60)
