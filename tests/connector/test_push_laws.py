"""The laws of connector/push_states.py under random events: one P rank, one D rank, calls that fail, bytes that land
late, a network that drops, repeats and delays. A P that is stopped is one whose messages wait while time goes on.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.legs import Send
from connector.offers import Offers
from connector.push_legs import PushReport, ReceiveReport, StartWrite, StopWrites
from connector.pushes import Pushes
from connector.receptions import Receptions
from connector.side_channel import Answer, Cancel, Hello, Meta, Open, PushDone, PushFail, RecvReady, Request
from connector.step import Receive, Save, StopPush
from connector.transfers import Outcome
from pdq.wire.types import pack_ids
from tests.connector.simulated_push import (
    D_BASE,
    D_BLOCKS,
    P_BASE,
    P_BLOCKS,
    PAIR,
    SETTINGS,
    SOURCE,
    Job,
    Prefill,
    Receiver,
    addresses,
    content,
    regions,
)

P_AT, D_AT = "tcp://p:7", "tcp://d:9"


class Pushing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.count = 0
        self.memory: dict[int, int] = {}
        self.p_free, self.d_free = list(range(P_BLOCKS)), list(range(D_BLOCKS))
        self.prefills: dict[str, Prefill] = {}
        self.receivers: dict[str, Receiver] = {}
        self.reported: set[str] = set()
        self.jobs: list[Job] = []
        self.late: list[tuple[int, int, int]] = []
        """(generation, value, D's address) of failed calls."""
        self.generation = 0
        self.is_fence_wanted = False
        self.to_p: list[Request | Answer] = []
        self.to_d: list[Request | Answer] = []
        self.pushes = Pushes(SETTINGS, hello=self._hello("p-1"), regions=regions(P_BASE, P_BLOCKS))
        self.receptions = Receptions(
            SETTINGS, hello=self._hello("d-1"), transport_at=lambda: (f"d:{self.generation}", self.generation)
        )
        self.offers = Offers(SETTINGS, consumer="d-1")

    # P's engine

    @rule(num_blocks=st.integers(1, 3))
    def begin_prefill(self, num_blocks: int) -> None:
        if len(self.p_free) >= num_blocks:
            self.count += 1
            prefill = Prefill(self.count, num_blocks, [self.p_free.pop(0) for _ in range(num_blocks)])
            self.prefills[prefill.name] = prefill
            self.pushes.expect(prefill.push, self.now)
            self._settle()

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
            self._settle()
        self.pushes.end_step(self.now, self.now)
        prefill.num_computed += 1
        if is_last:
            prefill.is_left = True
            self.pushes.pushed(prefill.name, self.now)
        self._settle()

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick: int) -> None:
        running = [p for p in self.prefills.values() if not p.is_left and p.num_computed]
        if not running:
            return
        prefill = running[pick % len(running)]
        self.pushes.preempt([prefill.name])
        self._settle()
        for _ in range(99):
            if self.pushes.is_quiet(prefill.name):
                break
            self.write()
        self._free_p(prefill.blocks)
        prefill.blocks = [self.p_free.pop(0) for _ in prefill.blocks]
        prefill.num_computed = 0

    @rule(pick=st.integers(0, 99))
    def abort_or_release(self, pick: int) -> None:
        if self.prefills:
            prefill = list(self.prefills.values())[pick % len(self.prefills)]
            prefill.is_left = True
            self.pushes.stop(StopPush(engine_request_id=prefill.name, reason="aborted", is_reported=True), self.now)
            self._settle()

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
        self._settle()

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.receivers:
            name = sorted(self.receivers)[pick % len(self.receivers)]
            self.offers.stop(name)
            self.receptions.cancel(name, self.now)
            self._settle()

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
            for queue, hear in ((self.to_p, self._p_hears), (self.to_d, self._d_hears)):
                while queue:
                    hear(queue.pop(0))

    @rule(to_p=st.booleans(), fate=st.sampled_from(["deliver", "deliver", "late", "drop", "repeat"]))
    def message(self, to_p: bool, fate: str) -> None:
        queue, hear = (self.to_p, self._p_hears) if to_p else (self.to_d, self._d_hears)
        if queue:
            message = queue[0] if fate == "repeat" else queue.pop(0)
            if fate == "late":
                queue.append(message)
            elif fate != "drop":
                hear(message)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 5.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._settle()

    # Transports

    @rule()
    def write(self) -> None:
        """P's call in flight moves a byte, or fails: nobody is at that address any more."""
        if not self.jobs:
            return
        job = self.jobs[0]
        if job.generation != self.generation:
            self._break(job)
        elif job.pairs:
            local, remote = job.pairs.pop(0)
            self._land(self.memory[local], remote)
        if self.jobs and self.jobs[0] is job and not job.pairs:
            self.jobs.pop(0)
            self.pushes.written(job.job_id, job.push_id, self.now, self.now, self.now)
        self._settle()

    @rule()
    def break_write(self) -> None:
        if self.jobs:
            self._break(self.jobs[0])
            self._settle()

    @rule()
    def land_late(self) -> None:
        """A byte of a failed call arrives, unless D has fenced."""
        if self.late:
            generation, value, remote = self.late.pop(0)
            if generation == self.generation:
                self._land(value, remote)

    @rule()
    def fence(self) -> None:
        if self.is_fence_wanted:
            self.is_fence_wanted = False
            self.generation += 1
            self.receptions.fenced(self.now)
            self._settle()

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
            self._settle()
            if not self.prefills and not self.receivers:
                break
        assert not self.prefills
        assert not self.receivers
        assert not self.jobs

    def _hello(self, name: str) -> Hello:
        return Hello(epoch="", consumer=name, rank=0, tp_size=1, fingerprint="a=1")

    def _p_hears(self, message: Any) -> None:
        if isinstance(message, RecvReady):
            self.pushes.recv_ready(message, self.to_d.append, self.now)
        elif isinstance(message, Cancel):
            self.pushes.cancel(message, self.to_d.append, self.now)
        else:
            self.pushes.on_answer(D_AT, message, self.now)
        self._settle()

    def _d_hears(self, message: Any) -> None:
        if isinstance(message, Hello):
            self.to_p.append(
                Meta(epoch="d-1", rank=0, tp_size=1, regions=tuple(regions(D_BASE, D_BLOCKS)), transport_address="d:0")
            )
        elif isinstance(message, Open | PushDone | PushFail):
            self.receptions.on_message(message, self.to_p.append, self.now)
        else:
            self.offers.on_message(P_AT, message, self.now)
            self.receptions.on_answer(P_AT, message, self.now)
        self._settle()

    def _break(self, job: Job) -> None:
        """What the call has under way may land later. P fences, so nothing is read any more."""
        self.late += [(job.generation, self.memory[local], remote) for local, remote in job.pairs]
        self.jobs.remove(job)
        self.pushes.broken(job.job_id, job.push_id, "status -1", False, self.now)

    def _land(self, value: int, remote: int) -> None:
        owners = [name for name, r in self.receivers.items() if remote in r.addresses]
        assert owners, "a byte landed in blocks that were given back"
        assert owners == [f"r{value // 100}"], "another request's byte"
        self.memory[remote] = value

    def _settle(self) -> None:
        self.pushes.tick(self.now)
        self.receptions.tick(self.now)
        self.to_p += [message for _, message in self.offers.tick(self.now)]
        for name, reason in self.offers.take_gone().items():
            self.receptions.lose(name, reason, self.now)
        for action in self.pushes.take_actions():
            if isinstance(action, Send):
                self.to_d.append(action.message)
            elif isinstance(action, StartWrite):
                self.jobs.append(Job.of(action))
            elif isinstance(action, StopWrites):
                for job in [job for job in self.jobs[1:] if job.push_id == action.push_id]:
                    self.jobs.remove(job)
                    self.pushes.dropped(job.job_id, job.push_id, self.now)
                self._settle()
            else:
                self._pushed(action)
        for answer in self.receptions.take_actions():
            if isinstance(answer, Send):
                self.to_p.append(answer.message)
            elif isinstance(answer, ReceiveReport):
                self._received(answer)
            else:
                self.is_fence_wanted = True

    def _pushed(self, report: PushReport) -> None:
        prefill = self.prefills.pop(report.engine_request_id)  # KeyError: freed twice
        assert prefill.is_left
        mine = {address for block in prefill.blocks for address in addresses(P_BASE, block)}
        assert not any(local in mine for job in self.jobs for local, _ in job.pairs), "freed under a write"
        self._free_p(prefill.blocks)

    def _free_p(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory.update(dict.fromkeys(addresses(P_BASE, block), -1))  # anybody's now
        self.p_free += blocks

    def _received(self, report: ReceiveReport) -> None:
        name = report.receive.engine_request_id
        receiver = self.receivers.pop(name)  # KeyError: reported twice
        self.reported.add(name)
        writing = {remote for job in self.jobs if job.generation == self.generation for _, remote in job.pairs}
        landing = {remote for generation, _, remote in self.late if generation == self.generation}
        assert not (writing | landing) & receiver.addresses, "reported while its blocks may be written"
        if report.outcome is Outcome.OK:
            for index, block in list(enumerate(receiver.blocks))[receiver.first_block :]:
                found = [self.memory.get(address) for address in addresses(D_BASE, block)]
                assert found == [content(receiver.number, index, layer) for layer in range(2)]
        for block in receiver.blocks:
            self.memory.update(dict.fromkeys(addresses(D_BASE, block), -2))
        self.d_free += receiver.blocks


Pushing.TestCase.settings = hypothesis_settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPushing = Pushing.TestCase
