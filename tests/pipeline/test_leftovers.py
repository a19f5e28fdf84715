"""What counts as a leak of file descriptors."""

from __future__ import annotations

from collections import Counter

from tests.pipeline.leftovers import OpenFiles

GATEWAY = ("gateway-1", 17)


def held(**kinds: int) -> OpenFiles:
    named = {kind.replace("_", " ").replace("decode ", "decode-"): number for kind, number in kinds.items()}
    return OpenFiles(kinds={GATEWAY: Counter(named)})


def test_links_to_processes_that_live_are_no_leak():
    before = held(eventfd=10, tcp_to_decode_1=1)

    assert before.leaks(held(eventfd=16, tcp_to_decode_1=1, tcp_to_decode_2=2, tcp_from_decode_1=2), spare=0) == []


def test_what_is_left_of_links_to_the_dead_is_one():
    before = held(eventfd=10, tcp_to_decode_1=1)

    (leak,) = before.leaks(held(eventfd=16, tcp_to_decode_1=1), spare=5)

    assert leak == "gateway-1 (pid 17): +6 file descriptors, more than before: {'eventfd': 6}"
    assert before.leaks(held(eventfd=16, tcp_to_decode_1=1), spare=6) == []


def test_ever_more_connections_to_the_same_process_are_one():
    before = held(tcp_from_decode_1=1)

    assert before.leaks(held(tcp_from_decode_1=9), spare=0) == []
    assert before.leaks(held(tcp_from_decode_1=10), spare=0)


def test_who_is_new_has_nothing_to_compare_with():
    assert OpenFiles(kinds={}).leaks(held(eventfd=100), spare=0) == []
