from __future__ import annotations

import pytest

from pdq.wire.link import FrameReceiver, FrameSender, LinkOverflow


def sender(**options):
    return FrameSender(**{"max_retained": 10, "resend_s": 1.0, **options})


def send_all(link):
    sent = []
    for frame, payload in link.unsent():
        link.mark_sent(frame)
        sent.append((frame, payload))
    return sent


def test_frames_are_numbered_from_one_and_sent_once():
    link = sender()

    assert [link.retain(text, 0.0) for text in "ab"] == [1, 2]
    assert send_all(link) == [(1, "a"), (2, "b")]
    assert send_all(link) == []


def test_a_refused_frame_is_offered_again_before_later_ones():
    link = sender()
    link.retain("a", 0.0)
    link.retain("b", 0.0)

    assert next(link.unsent()) == (1, "a")  # refused: not marked
    assert list(link.unsent()) == [(1, "a")]  # stops at the first that is not marked
    assert send_all(link) == [(1, "a"), (2, "b")]


def test_too_many_unacknowledged_frames_are_refused_until_an_ack():
    link = sender(max_retained=2)
    link.retain("a", 0.0)
    link.retain("b", 0.0)
    with pytest.raises(LinkOverflow, match="2 frames"):
        link.retain("c", 0.0)

    send_all(link)
    link.on_ack(1, 0.0)

    assert link.retain("c", 0.0) == 3
    assert link.oldest == 2


def test_a_reset_sends_everything_unacknowledged_again():
    link = sender()
    for text in "abc":
        link.retain(text, 0.0)
    send_all(link)
    link.on_ack(1, 0.0)
    link.on_reset(0.1)

    assert send_all(link) == [(2, "b"), (3, "c")]


def test_no_ack_in_time_sends_again_at_growing_distances():
    link = sender()
    link.retain("a", 0.0)
    send_all(link)

    resent_at = []
    for tenth in range(200):
        link.on_tick(tenth / 10)
        if send_all(link):
            resent_at.append(tenth / 10)

    assert resent_at == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_an_ack_that_was_on_its_way_during_a_reset_counts():
    link = sender()
    link.retain("a", 0.0)
    link.retain("b", 0.0)
    send_all(link)
    link.on_reset(0.1)
    link.on_ack(1, 0.2)

    assert send_all(link) == [(2, "b")]


def test_a_repeated_ack_sends_again_but_not_time_and_again():
    link = sender()
    link.retain("a", 0.0)
    link.retain("b", 0.0)
    send_all(link)
    link.on_ack(0, 0.1)

    assert send_all(link) == [(1, "a"), (2, "b")]
    link.on_ack(0, 0.2)
    assert send_all(link) == []
    link.on_ack(0, 0.4)
    assert send_all(link) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("nonsense", [-5, 7, 2**63])
def test_an_ack_of_something_never_sent_changes_nothing(nonsense):
    link = sender()
    link.retain("a", 0.0)
    send_all(link)
    link.on_ack(nonsense, 0.0)

    assert (link.oldest, link.num_retained) == (1, 1)
    assert send_all(link) == []


def test_a_duplicate_is_dropped_and_acknowledged_again():
    link = FrameReceiver(ack_interval_s=0.1)

    assert link.accept(1, oldest=1)
    assert link.ack_due(0.0) == 1
    assert not link.accept(1, oldest=1)
    assert link.ack_due(0.05) is None
    assert link.next_deadline() == 0.1
    assert link.ack_due(0.1) == 1
    assert link.ack_due(0.2) is None


def test_a_gap_is_not_accepted_and_repeats_the_last_ack():
    link = FrameReceiver(ack_interval_s=0.1)
    link.accept(1, oldest=1)
    link.ack_due(0.0)

    assert not link.accept(3, oldest=1)
    assert link.ack_due(1.0) == 1
    assert link.accept(2, oldest=1)


def test_a_new_receiver_starts_at_the_oldest_frame_not_at_the_first_seen():
    link = FrameReceiver(ack_interval_s=0.1)

    assert not link.accept(59, oldest=57)
    assert link.ack_due(0.0) == 56
    assert [link.accept(frame, oldest=57) for frame in (57, 58, 59)] == [True] * 3


def test_frames_that_were_given_up_are_skipped_and_counted():
    link, receiver = sender(), FrameReceiver(ack_interval_s=0.1)
    link.retain("a", 0.0)
    send_all(link)
    assert receiver.accept(1, oldest=1)
    link.retain("b", 0.0)

    assert receiver.accept(3, oldest=3), "the sender's link was dropped with what it kept; numbering goes on"
    assert receiver.num_skipped == 1
