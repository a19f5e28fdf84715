"""D's core of push, event by event: what the random events found, and what they can't see."""

from __future__ import annotations

from dataclasses import replace

from connector.push_legs import FenceTransport, ReceiveReport
from connector.receptions import Receptions
from connector.side_channel import Answer, Hello, Open, Opened, PushAck, PushDone, PushFail
from connector.step import Lost, Receive
from connector.transfers import Outcome
from pdq.wire.types import KvSource
from tests.connector.simulated_push import PAIR, SETTINGS, SOURCE


class Rank:
    """D's rank with a transport whose fences the test makes."""

    def __init__(self, source: KvSource = SOURCE) -> None:
        self.source = source
        self.generation = 0
        self.answers: list[Answer] = []
        self.core = Receptions(
            SETTINGS,
            hello=Hello(epoch="", consumer="d-1", rank=0, tp_size=1, fingerprint="a=1", num_kv_heads=2),
            transport_at=lambda: (f"d:{self.generation}", self.generation),
        )

    def receive(self, name: str) -> None:
        receive = Receive(engine_request_id=name, transfer_id=name, pair=PAIR, source=self.source, num_tokens=16)
        self.core.start(receive, 0.0)

    def open(self, name: str, broken_generation: int | None = None) -> None:
        message = Open(
            epoch="d-1",
            transfer_id=name,
            pair=PAIR,
            producer="p-1",
            rank=0,
            tp_size=1,
            broken_generation=broken_generation,
        )
        self.core.on_message(message, self.answers.append, 0.0)

    def fail(self, name: str, *, is_drained: bool, rank: int = 0) -> None:
        message = PushFail(
            epoch="d-1",
            transfer_id=name,
            pair=PAIR,
            producer="p-1",
            rank=rank,
            reason="status -1",
            is_drained=is_drained,
        )
        self.core.on_message(message, self.answers.append, 0.0)

    def fence(self) -> None:
        self.generation += 1
        self.core.fenced(0.0)

    def reports(self) -> dict[str, Outcome]:
        actions = self.core.take_actions()
        return {a.receive.engine_request_id: a.outcome for a in actions if isinstance(a, ReceiveReport)}

    def is_fence_wanted(self) -> bool:
        return any(isinstance(action, FenceTransport) for action in self.core.take_actions())


def test_who_was_told_the_new_address_within_a_fence_counts_as_a_writer_from_then_on():
    d = Rank()
    for name in ("a", "b"):
        d.receive(name)
    d.open("a")
    d.fail("a", is_drained=False)
    d.open("b")  # waits for the fence

    d.fence()
    assert isinstance(d.answers[-1], Opened)
    d.core.cancel("b", 0.0)

    assert d.reports() == {"a": Outcome.FAILED}  # b may be written: it is not safe yet


def test_a_reader_cancelled_before_anybody_could_write_is_safe_at_once():
    d = Rank()
    d.receive("a")

    d.core.cancel("a", 0.0)

    assert d.reports() == {"a": Outcome.CANCELLED}


def test_a_failure_that_comes_before_its_reception_is_kept_for_it_and_acknowledged_then():
    d = Rank()

    d.fail("a", is_drained=True)
    assert d.answers == []  # so P says it again, should the reception take its time
    d.receive("a")

    assert isinstance(d.answers.pop(), PushAck)
    assert d.reports() == {"a": Outcome.FAILED}
    d.fail("a", is_drained=True)
    assert isinstance(d.answers.pop(), PushAck)


def test_failures_of_all_ranks_that_come_before_their_reception_end_it_once():
    d = Rank(replace(SOURCE, tp_size=2))
    for rank in range(2):
        d.fail("a", is_drained=True, rank=rank)

    d.receive("a")

    assert [type(answer) for answer in d.answers] == [PushAck, PushAck]
    assert d.reports() == {"a": Outcome.FAILED}


def test_a_writer_that_does_not_answer_is_fenced_at_once_and_one_that_has_given_up_is_asked_to_stop():
    d = Rank()
    for name in ("dead", "gone"):
        d.receive(name)
        d.open(name)

    d.core.lose(Lost("gone", "P says gone", is_silent=False), 0.0)
    assert not d.is_fence_wanted()
    d.core.lose(Lost("dead", "P has not answered 6 times", is_silent=True), 0.0)
    assert d.is_fence_wanted()
    assert d.reports() == {}
    d.fence()

    assert d.reports() == {"dead": Outcome.FAILED, "gone": Outcome.FAILED}


def test_one_fence_serves_all_whose_calls_it_broke():
    d = Rank()
    for name in ("a", "b"):
        d.receive(name)
        d.open(name)
    d.open("a", broken_generation=0)
    assert d.is_fence_wanted()
    d.fence()

    d.open("b", broken_generation=0)

    assert not d.is_fence_wanted()
    assert [answer.transport_generation for answer in d.answers[-2:] if isinstance(answer, Opened)] == [1, 1]


def test_a_source_that_takes_itself_for_a_spare_fails_the_reception():
    d = Rank()
    d.receive("a")

    d.core.on_message(
        PushDone(
            epoch="d-1",
            transfer_id="a",
            pair=PAIR,
            producer="p-1",
            rank=0,
            num_tokens=16,
            num_bytes=0,
            num_descriptors=0,
            seconds=0.0,
            hidden_seconds=0.0,
            is_spare=True,
        ),
        d.answers.append,
        0.0,
    )

    assert isinstance(d.answers[-1], PushAck)
    assert d.reports() == {"a": Outcome.FAILED}
