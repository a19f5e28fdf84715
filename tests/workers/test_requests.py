"""The decode worker's state table: one decode per pair, whatever is repeated, late or cancelled."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.messages import Accepted, Delta, Gone, KvReady
from decode_worker.requests import DecodeRequest, RequestTable, State, Verdict
from pdq.wire.types import KvTicket, Pair, SamplingParams, pack_ids


def kv_ready(
    request_id: str = "r",
    gen: int = 1,
    attempt: int = 1,
    *,
    remaining_s: float = 60.0,
    gateway: str = "tcp://127.0.0.1:1",
) -> KvReady:
    pair = Pair(gen=gen, attempt=attempt)
    return KvReady(
        request_id=request_id,
        pair=pair,
        remaining_s=remaining_s,
        prompt_ids=pack_ids([1, 2, 3]),
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=4),
        ticket=KvTicket(
            transfer_id=request_id,
            pair=pair,
            engine_id="p",
            epoch="e",
            host="127.0.0.1",
            port=1,
            tp_size=1,
            block_size=16,
            num_tokens=3,
            block_ids=pack_ids([0]),
        ),
        gateway=gateway,
        gateway_id="gateway-1",
        prefill_worker="prefill-1",
        prefill_endpoint="tcp://127.0.0.1:2",
        queue_wait_s=0.0,
        prefill_s=0.0,
        cached_tokens=0,
    )


def test_a_repeat_while_admitting_waits_for_the_same_answer() -> None:
    table = RequestTable(answer_memory_s=20)
    table.open(kv_ready(), now=0)

    assert table.classify(kv_ready(), now=0) == (Verdict.ADMITTING, None)


def test_a_repeat_after_the_answer_was_lost_gets_it_again_even_after_the_finish() -> None:
    table = RequestTable(answer_memory_s=20)
    request, _ = table.open(kv_ready(), now=0)
    table.go(request, now=0)
    table.close(request, now=1)

    verdict, answer = table.classify(kv_ready(), now=2)

    assert verdict is Verdict.ANSWERED
    assert isinstance(answer, Accepted)


def test_a_running_request_is_accepted_again_long_after_its_answer() -> None:
    table = RequestTable(answer_memory_s=20)
    request, _ = table.open(kv_ready(), now=0)
    table.go(request, now=0)

    _, answer = table.classify(kv_ready(), now=1000)

    assert isinstance(answer, Accepted)


def test_a_higher_pair_replaces_a_lower_one_and_the_lower_one_is_gone() -> None:
    table = RequestTable(answer_memory_s=20)
    first, _ = table.open(kv_ready(attempt=1), now=0)

    assert table.classify(kv_ready(attempt=2), now=0) == (Verdict.NEW, None)
    _, replaced = table.open(kv_ready(attempt=2), now=0)

    assert replaced is first
    _, answer = table.classify(kv_ready(attempt=1), now=0)
    assert isinstance(answer, Gone)


def test_what_is_answered_already_is_replaced_by_a_higher_gen_only() -> None:
    table = RequestTable(answer_memory_s=20)
    request, _ = table.open(kv_ready(attempt=1), now=0)
    request.next_seq = 3  # held back
    assert table.classify(kv_ready(attempt=2), now=0) == (Verdict.NEW, None)

    table.go(request, now=0)

    _, answer = table.classify(kv_ready(attempt=2), now=0)
    assert isinstance(answer, Gone)
    assert table.classify(kv_ready(gen=2), now=0) == (Verdict.NEW, None)


def test_a_cancel_that_came_first_bars_the_request() -> None:
    table = RequestTable(answer_memory_s=20)
    table.bar("r", Pair(gen=1, attempt=5), 0, "client gone")

    _, answer = table.classify(kv_ready(attempt=3), now=1)
    assert isinstance(answer, Gone)
    assert table.classify(kv_ready(gen=2), now=1) == (Verdict.NEW, None)


def test_answers_are_forgotten_after_their_time() -> None:
    table = RequestTable(answer_memory_s=20)
    table.bar("r", Pair(gen=1, attempt=5), 0, "client gone")

    assert table.classify(kv_ready(attempt=3), now=21) == (Verdict.NEW, None)


class TableMachine(RuleBasedStateMachine):
    """Random KvReadys, answers and cancels: at most one decode per request is open, and no pair decodes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(answer_memory_s=1e9)
        self.now = 0.0
        self.open: dict[str, DecodeRequest] = {}
        self.started: set[tuple[str, Pair]] = set()
        self.barred: dict[str, Pair] = {}

    @rule(request_id=st.sampled_from("ab"), gen=st.integers(1, 3), attempt=st.integers(1, 3))
    def kv_ready_comes(self, request_id: str, gen: int, attempt: int) -> None:
        ready = kv_ready(request_id, gen, attempt)
        verdict, _ = self.table.classify(ready, self.now)
        if verdict is not Verdict.NEW:
            return
        assert (request_id, ready.pair) not in self.started, "a pair must not be decoded twice"
        assert request_id not in self.barred or ready.pair > self.barred[request_id], "cancelled"
        request, replaced = self.table.open(ready, self.now)
        assert replaced is self.open.get(request_id)
        assert replaced is None or replaced.offer.pair < ready.pair
        self.open[request_id] = request
        self.started.add((request_id, ready.pair))

    @rule(request_id=st.sampled_from("ab"))
    def the_gateway_says_go(self, request_id: str) -> None:
        request = self.open.get(request_id)
        if request is not None and request.state is State.ADMITTING:
            request.held_back.append(Delta(request_id=request_id, pair=request.offer.pair, seq=0, token_ids=b""))
            assert len(self.table.go(request, self.now)) == 1
            assert not request.held_back

    @rule(request_id=st.sampled_from("ab"), gone=st.sampled_from([None, "reason"]))
    def it_ends(self, request_id: str, gone: str | None) -> None:
        request = self.open.pop(request_id, None)
        if request is not None:
            if request.state is State.ADMITTING:
                gone = "reason"  # without a remembered answer the same pair may start anew: not what is tested here
            self.table.close(request, self.now, gone=gone)
            self.barred[request_id] = max(self.barred.get(request_id, request.offer.pair), request.offer.pair)

    @rule(request_id=st.sampled_from("ab"), gen=st.integers(1, 3))
    def a_cancel_comes(self, request_id: str, gen: int) -> None:
        pair = Pair(gen=gen, attempt=3)
        self.table.bar(request_id, pair, self.now, "client gone")
        request = self.open.get(request_id)
        if request is not None and request.offer.pair <= pair:
            self.table.close(self.open.pop(request_id), self.now, gone="client gone")
        self.barred[request_id] = max(self.barred.get(request_id, pair), pair)

    @invariant()
    def the_table_has_what_is_open(self) -> None:
        assert len(self.table) == len(self.open)
        for request in self.open.values():
            assert self.table.is_open(request)
            assert self.table.by_engine_id(request.engine_request_id) is request


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
