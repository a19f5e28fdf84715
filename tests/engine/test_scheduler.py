"""The scheduler against scripted transfers: what is held when, and that every request ends once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.step import TransferResults
from engine.base import LoadKv, PrefillOnly
from engine.embedded.block_pool import BlockPool
from engine.embedded.intake import Limits
from engine.embedded.request import TRANSITIONS, Event, IllegalTransition, State
from engine.embedded.runner import NOT_SAMPLED, ChunkResult
from engine.embedded.scheduler import Scheduler
from engine.embedded.settings import EngineSettings
from tests.engine.drive import Answers, request
from tests.engine.scripted_half import BLOCK_SIZE, ScriptedHalf, ticket

EOS = 9
SETTINGS = EngineSettings(
    num_blocks=16, block_size=BLOCK_SIZE, max_num_batched_tokens=16, max_num_seqs=8, watermark_blocks=1
)


class Rig:
    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self.half = ScriptedHalf()
        self.pool = BlockPool(settings.num_blocks)
        self.scheduler = Scheduler(
            settings,
            self.pool,
            self.half,
            limits=Limits(max_model_len=settings.num_blocks * BLOCK_SIZE, vocab_size=1000),
            eos_token_ids=frozenset({EOS}),
        )
        self.answers = Answers()

    def local(self, name: str, num_tokens: int, **options) -> None:
        self.scheduler.add(request(name, list(range(100, 100 + num_tokens)), **options))

    def prefill(self, name: str, num_tokens: int) -> None:
        self.local(name, num_tokens, kv=PrefillOnly())

    def load(self, name: str, num_tokens: int, **options) -> None:
        self.local(name, num_tokens, kv=LoadKv(ticket=ticket(name, num_tokens)), **options)

    def step(self, token: int = 5, results: TransferResults | None = None) -> int:
        """One step that samples `token` everywhere; returns how many tokens it computed."""
        chunks = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in chunks) <= 16
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.num_computed + chunk.num_tokens <= len(sequence.block_ids) * BLOCK_SIZE
        self.scheduler.update(chunks, [ChunkResult(token) if chunk.sample else NOT_SAMPLED for chunk in chunks])
        if results is not None:
            self.scheduler.on_transfers(results)
        self._take()
        return sum(chunk.num_tokens for chunk in chunks)

    def transfers(self, results: TransferResults) -> None:
        self.scheduler.on_transfers(results)
        self._take()

    def abort(self, name: str) -> None:
        self.scheduler.abort(f"{name}:1:1")
        self._take()

    def state(self, name: str) -> State | None:
        return self.scheduler.state_of(f"{name}:1:1")

    def _take(self) -> None:
        outputs, released = self.scheduler.take_news()
        for output in outputs:
            self.answers.of(output.engine_request_id).take(output)
        for engine_request_id in released:
            self.answers.of(engine_request_id).num_released += 1
        self.pool.check_integrity()


def test_a_request_that_loads_holds_its_blocks_and_computes_nothing():
    rig = Rig()
    rig.load("a", 10)

    assert rig.step() == 0

    assert rig.state("a") is State.WAITING_FOR_REMOTE_KVS
    assert rig.pool.num_free == 13
    assert rig.scheduler.counts() == (0, 1, 0)


def test_after_the_load_the_last_prompt_token_alone_is_computed():
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.transfers(rig.half.loaded("a:1:1"))

    assert rig.step() == 1
    assert rig.answers["a"].ids == [5]
    assert rig.half.calls == ["alloc a:1:1 10", "alloc a:1:1 0"]


def test_a_failed_load_ends_in_an_error_and_gives_its_blocks_back():
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.transfers(rig.half.loaded(failed={"a:1:1": "peer gone"}))

    assert rig.answers["a"].end.error == "kv_transfer_failed: peer gone"
    assert rig.answers["a"].num_released == 1
    assert rig.pool.num_free == 16


@pytest.mark.parametrize("is_failed", [False, True])
def test_an_abort_while_loading_frees_the_blocks_only_once_drained(is_failed: bool):
    rig = Rig()
    rig.load("a", 10)
    rig.step()

    rig.abort("a")
    rig.abort("a")
    assert rig.state("a") is State.DRAINING
    assert (rig.pool.num_free, rig.answers["a"].num_released) == (13, 0)

    rig.transfers(rig.half.loaded(failed={"a:1:1": "cancelled"}) if is_failed else rig.half.loaded("a:1:1"))
    assert (rig.pool.num_free, rig.answers["a"].num_released) == (16, 1)
    assert rig.answers["a"].end is None


def test_an_abort_between_load_and_next_step():
    rig = Rig()
    rig.load("a", 10)
    rig.step()
    rig.transfers(rig.half.loaded("a:1:1"))

    rig.abort("a")

    assert (rig.step(), rig.pool.num_free, rig.answers["a"].num_released) == (0, 16, 1)


def test_a_prefill_ends_pinned_until_it_is_sent():
    rig = Rig()
    rig.prefill("a", 20)

    assert (rig.step(), rig.step()) == (16, 4)

    answer = rig.answers["a"]
    assert (answer.end.finish, answer.ids) == ("prefilled", [])
    assert answer.end.ticket is not None
    assert rig.scheduler.counts() == (0, 0, 1)
    rig.scheduler.release("a:1:1")
    assert rig.pool.num_free == 11
    rig.transfers(rig.half.sent("a:1:1"))
    assert (rig.pool.num_free, answer.num_released) == (16, 1)
    assert rig.scheduler.counts() == (0, 0, 0)


def test_an_eos_as_first_token_does_not_disturb_a_prefill():
    rig = Rig()
    rig.prefill("a", 3)

    rig.step(token=EOS)

    assert rig.answers["a"].end.finish == "prefilled"


def test_a_prefill_that_does_not_fit_waits_for_pinned_blocks():
    rig = Rig(replace(SETTINGS, prefix_caching=False))
    rig.prefill("a", 40)
    for _ in range(3):
        rig.step()
    rig.prefill("b", 40)
    assert rig.step() == 0
    assert not rig.scheduler.can_compute

    rig.transfers(rig.half.sent("a:1:1"))

    assert rig.step() == 16


def test_one_that_is_undecided_lets_others_pass_and_keeps_its_place():
    rig = Rig()
    rig.half.undecided.add("a:1:1")
    rig.load("a", 10)
    rig.local("b", 4)
    rig.local("c", 4)

    assert rig.step() == 8
    assert rig.state("a") is State.WAITING
    rig.half.undecided.clear()
    rig.step()
    assert rig.state("a") is State.WAITING_FOR_REMOTE_KVS


def test_gone_kv_fails_a_waiting_request_at_once():
    rig = Rig(replace(SETTINGS, max_num_seqs=1))
    rig.local("busy", 4)
    rig.step()
    rig.load("a", 10)

    rig.scheduler.fail_gone({"a:1:1": "P restarted", "busy:1:1": "not this one", "nobody": "?"})
    rig.step()

    assert rig.answers["a"].end.error == "kv_transfer_failed: P restarted"
    assert rig.answers["a"].num_released == 1
    assert rig.answers["busy"].end is None


def test_ids_that_nobody_waits_for_are_dropped():
    rig = Rig()
    rig.local("a", 4)
    rig.step()

    ids = frozenset({"a:1:1", "nobody"})
    rig.transfers(TransferResults(finished_sending=ids, finished_recving=ids, failed_recving={"nobody": "x"}))

    assert rig.state("a") is State.RUNNING
    assert rig.answers["a"].num_released == 0


def test_loads_and_growth_together_cannot_lock_up():
    rig = Rig(replace(SETTINGS, num_blocks=10))
    names = [f"r{i}" for i in range(8)]
    for name in names:
        rig.load(name, 14, max_tokens=20)
    for _ in range(600):
        rig.step(results=rig.half.loaded(*rig.half.loading))

    assert [rig.answers[name].end.finish for name in names] == ["length"] * 8
    assert [rig.answers[name].num_released for name in names] == [1] * 8
    assert rig.pool.num_free == 10


def test_a_second_request_with_a_known_id_is_ignored():
    rig = Rig()
    rig.local("a", 4)
    rig.local("a", 8)

    assert rig.step() == 4


def test_illegal_events_raise():
    rig = Rig()
    rig.local("a", 4)
    rig.step()
    found = rig.scheduler._requests["a:1:1"]

    with pytest.raises(IllegalTransition, match="SENT in RUNNING"):
        found.on(Event.SENT)
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.FINISHED}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, aborts, releases, steps and transfer ends."""

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
