"""Two requests with the same KV ticket in one engine: one is refused at once, and none is left without a report."""

from __future__ import annotations

import pytest

from connector.legs import Report
from connector.live_transfers import LiveTransfers
from connector.loads import Loads
from connector.params import ParamsError, PullConsumer, PullProducer, PushConsumer, PushProducer
from connector.producer import Producer
from connector.push_legs import PushReport, ReceiveReport
from connector.pushes import Pushes
from connector.receptions import Receptions
from connector.side_channel import Done, Hello
from connector.step import Expect, Load, Push, Receive, StepMeta, StopPush
from connector.transfers import USED_TWICE, Outcome
from pdq.wire.types import KvSource, KvTicket, Pair, pack_ids
from tests.connector.worlds import PATIENT

PAIR = Pair(gen=1, attempt=1)
HELLO = Hello(epoch="", consumer="here-1", rank=0, tp_size=1, fingerprint="a=1")
SOURCE = KvSource(engine_id="p", epoch="p-1", host="p", port=7, tp_size=1, block_size=16)


def ticket(host: str = "p") -> KvTicket:
    return KvTicket(
        transfer_id="r",
        pair=PAIR,
        engine_id="p",
        epoch="p-1",
        host=host,
        port=7,
        tp_size=1,
        block_size=16,
        num_tokens=16,
        block_ids=pack_ids([3]),
    )


ALL = [
    PullProducer(transfer_id="r", pair=PAIR),
    PullConsumer(ticket=ticket()),
    PushProducer(transfer_id="r", pair=PAIR),
    PushConsumer(transfer_id="r", pair=PAIR, source=SOURCE),
]


# Beside the scheduler


@pytest.mark.parametrize("request_", ALL)
def test_a_second_request_with_the_same_ticket_is_refused_and_told_what_to_do(request_):
    live = LiveTransfers(kept_s=4.0)
    live.check(request_, 0.0)
    live.begin("first", request_)

    with pytest.raises(ParamsError, match=r"r:1.1 belongs to request first .* n > 1 send requests of their own"):
        live.check(request_, 0.0)


def test_each_part_of_one_engine_in_the_same_transfer_is_another_matter():
    live = LiveTransfers(kept_s=4.0)
    for number, request in enumerate([*ALL, PullConsumer(ticket=ticket(host="p2"))]):
        live.check(request, 0.0)
        live.begin(f"e{number}", request)


def test_a_reader_of_pull_may_try_again_once_the_first_is_through():
    live, request = LiveTransfers(kept_s=4.0), PullConsumer(ticket=ticket())
    live.begin("first", request)
    live.end("first", 1.0)
    live.end("first", 1.0)  # again, when the request itself ends

    live.check(request, 1.0)


@pytest.mark.parametrize("request_", [request for request in ALL if not isinstance(request, PullConsumer)])
def test_others_may_once_no_late_message_can_come(request_):
    live = LiveTransfers(kept_s=4.0)
    live.begin("first", request_)
    live.end("first", 1.0)

    with pytest.raises(ParamsError):
        live.check(request_, 4.9)
    live.check(request_, 5.0)
    live.begin("second", request_)
    live.end("first", 5.0)
    with pytest.raises(ParamsError, match="second"):
        live.check(request_, 99.0)


# In the worker


def test_a_load_with_the_ticket_of_another_is_reported_at_once_and_the_other_as_usual():
    loads = Loads(PATIENT, hello=HELLO, regions=[])

    def start(name: str) -> None:
        load = Load(engine_request_id=name, ticket=ticket(), block_ids=(1,), first_block=0)
        loads.start(load, 0.0)

    def reports() -> list[tuple[str, Outcome, str]]:
        actions = loads.take_actions()
        return [(a.load.engine_request_id, a.outcome, a.reason) for a in actions if isinstance(a, Report)]

    start("first")
    start("second")
    assert reports() == [("second", Outcome.FAILED, USED_TWICE)]
    loads.tick(0.0)
    assert not any(isinstance(getattr(a, "message", None), Done) for a in loads.take_actions())
    loads.cancel("second", 1.0)
    loads.cancel("first", 1.0)
    assert reports() == [("first", Outcome.CANCELLED, "cancelled")]
    start("third")
    loads.cancel("third", 1.0)
    assert [name for name, _, _ in reports()] == ["third"]


def test_a_reception_with_the_ticket_of_another_is_reported_at_once_also_after_the_others_end():
    receptions = Receptions(PATIENT, hello=HELLO, transport_at=lambda: ("here", 0))

    def start(name: str) -> None:
        receive = Receive(engine_request_id=name, transfer_id="r", pair=PAIR, source=SOURCE, num_tokens=16)
        receptions.start(receive, 0.0)

    def reports() -> list[tuple[str, Outcome]]:
        actions = receptions.take_actions()
        return [(a.receive.engine_request_id, a.outcome) for a in actions if isinstance(a, ReceiveReport)]

    start("first")
    start("second")
    assert reports() == [("second", Outcome.FAILED)]
    receptions.cancel("second", 1.0)
    receptions.cancel("first", 1.0)
    assert reports() == [("first", Outcome.CANCELLED)]
    start("third")  # a late PUSH_DONE of the first must not be taken for this one's
    assert reports() == [("third", Outcome.FAILED)]


def test_a_prefill_with_the_ticket_of_another_is_freed_at_its_end_and_the_other_as_usual():
    producer = Producer(
        epoch="here-1",
        rank=0,
        tp_size=1,
        fingerprint="a=1",
        regions=(),
        lease_s=2.0,
        hold_s=9.0,
        transport_at=lambda: ("here", 0),
    )

    def expect(name: str) -> None:
        producer.apply(StepMeta(expected=(Expect(engine_request_id=name, transfer_id="r", pair=PAIR),)), 0.0)

    def freed() -> list[tuple[str, str]]:
        return [(pin.engine_request_id, pin.cause) for pin in producer.take_freed()]

    for name in ("first", "second", "aborted"):
        expect(name)
    producer.apply(StepMeta(pinned=("first", "second"), forgotten=("aborted",)), 1.0)
    assert freed() == [("second", USED_TWICE)]
    producer.apply(StepMeta(released=("second", "first")), 2.0)
    assert freed() == [("first", "released")]
    for name in ("third", "first"):  # within two leases
        expect(name)
        producer.apply(StepMeta(pinned=(name,)), 2.0)
        assert freed() == [(name, USED_TWICE)]


@pytest.mark.parametrize("is_over", [False, True], ids=["at once", "after the first one's end"])
def test_a_push_with_the_ticket_of_another_is_reported_at_its_end_and_the_other_as_usual(is_over: bool):
    pushes = Pushes(PATIENT, hello=HELLO, regions=[])

    def expect(name: str) -> None:
        pushes.expect(Push(engine_request_id=name, transfer_id="r", pair=PAIR, num_tokens=16, block_size=16), 0.0)

    def stop(name: str, *, is_reported: bool = True) -> None:
        pushes.stop(StopPush(engine_request_id=name, reason="released", is_reported=is_reported), 1.0)

    def reports() -> list[str]:
        return [a.engine_request_id for a in pushes.take_actions() if isinstance(a, PushReport)]

    expect("first")
    if is_over:
        stop("first")
        assert reports() == ["first"]
    for name in ("finished", "aborted", "without blocks"):
        expect(name)
    assert reports() == []
    pushes.pushed("finished", 1.0)
    stop("aborted")
    stop("without blocks", is_reported=False)
    stop("finished")  # a release that crosses the report
    assert reports() == ["finished", "aborted"]
    if not is_over:
        stop("first")
        assert reports() == ["first"]
