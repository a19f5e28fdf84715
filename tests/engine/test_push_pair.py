"""P pushes into D, two cores in one process, joined by the real connector halves over the memory transport."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from engine.base import PushKv, ReceiveKv
from engine.embedded.request import State
from engine.embedded.sim_echo import EOS
from tests.connector.faulty import FaultyTransport
from tests.engine.drive import PATIENT, SMALL, Bench, after_the_check, request

TEXT = "The quick brown fox jumps over the lazy dog"
SOON_OVER = replace(PATIENT, kv_answer_tries=3, kv_wait_s=3.0, kv_lease_s=2.0, kv_hold_s=3.0)
CHUNKED = replace(SMALL, max_num_batched_tokens=12, max_num_seqs=12)


class PushPair:
    """Steps P and D in turn until a condition holds; sleeps only until a connector thread reports something."""

    def __init__(self, p_settings=SMALL, d_settings=SMALL, connector=PATIENT) -> None:
        fabric = MemoryFabric()
        self.progress = threading.Event()
        self.transports = [FaultyTransport(MemoryTransport(fabric)) for _ in range(2)]
        self.p, self.d = (
            Bench(
                settings,
                connector=connector,
                transport=after_the_check(MemoryTransport(fabric), transport),
                role=role,
                on_progress=self.progress.set,
                mode="push",
            )
            for settings, role, transport in (
                (p_settings, "producer", self.transports[0]),
                (d_settings, "consumer", self.transports[1]),
            )
        )

    def until(self, condition, limit_s: float = 40.0, *, steps_d: bool = True) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.progress.clear()
            self.p.step()
            if steps_d:
                self.d.step()
            if condition():
                return
            if not (self.p.core.is_busy or self.d.core.is_busy):
                self.progress.wait(0.01)
        raise AssertionError(f"not reached: P {self.p.core.stats()}, D {self.d.core.stats()}")

    def receive(self, name: str, prompt, **options) -> None:
        self.d.submit(request(name, prompt, kv=ReceiveKv(source=self.p.info.kv_source), **options))

    def push(self, name: str, prompt, **options) -> None:
        self.p.submit(request(name, prompt, kv=PushKv(), **options))

    def is_settled(self) -> bool:
        return all(bench.core.pool.num_free == bench.num_free_at_start for bench in (self.p, self.d))

    def is_answered(self, *names: str) -> bool:
        return all(self.d.answers[name].end for name in names)

    def close(self) -> None:
        for transport in self.transports:
            transport.gate.set()
        self.d.core.close()
        self.p.core.close()


@pytest.fixture
def make():
    pairs: list[PushPair] = []

    def build(*settings, **options) -> PushPair:
        pairs.append(PushPair(*settings, **options))
        return pairs[-1]

    yield build
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("settings", [SMALL, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 12, 13, 63])
def test_prompts_of_all_lengths_arrive_whole_and_both_pools_are_back_at_the_start(make, settings, num_tokens: int):
    pair = make(settings, SMALL)
    prompt = [(11 * i) % 256 for i in range(num_tokens)]
    pair.receive("a", prompt)
    pair.push("a", prompt)

    pair.until(lambda: pair.is_answered("a") and pair.is_settled())

    assert pair.d.answers["a"].ids == [*prompt, EOS]
    assert pair.p.answers["a"].end.finish == "prefilled"
    assert pair.p.answers["a"].end.ticket is None
    assert [bench.answers["a"].num_released for bench in (pair.p, pair.d)] == [1, 1]


def test_each_layer_of_a_fresh_prompt_is_one_descriptor(make):
    pair = make()
    pair.receive("a", TEXT)
    pair.push("a", TEXT)

    pair.until(lambda: pair.is_answered("a"))

    transfer = pair.d.answers["a"].end.transfer
    assert transfer.num_bytes == -(-(len(TEXT) + 1) // 4) * 256
    assert transfer.num_descriptors <= 2
    assert 0.0 <= transfer.hidden_seconds <= transfer.seconds


def test_a_late_reader_gets_everything_after_the_prefill(make):
    pair = make(CHUNKED, SMALL)
    pair.push("a", TEXT)
    pair.until(lambda: pair.p.answers["a"].end is not None)
    assert pair.p.core.stats().pinned == 1

    pair.receive("a", TEXT)
    pair.until(lambda: pair.is_answered("a") and pair.is_settled())

    assert pair.d.answers["a"].text == TEXT
    assert pair.d.answers["a"].end.transfer.hidden_seconds == 0.0


def test_a_reader_that_never_comes_frees_p_after_the_hold(make):
    pair = make(connector=SOON_OVER)
    pair.push("a", TEXT)

    pair.until(lambda: pair.p.answers["a"].num_released == 1)

    pair.receive("a", TEXT)
    pair.until(lambda: pair.is_answered("a"))
    assert "no reader came" in pair.d.answers["a"].end.error
    pair.until(pair.is_settled)


def test_prefix_hits_of_both_sides(make):
    pair = make()
    for name in ("a", "b"):
        pair.receive(name, TEXT)
        pair.push(name, TEXT)
        pair.until(lambda name=name: pair.is_answered(name) and pair.is_settled())
    pair.d.core.pool.drop_cache()
    pair.receive("c", TEXT)
    pair.push("c", TEXT)
    pair.until(lambda: pair.is_answered("c") and pair.is_settled())

    assert [pair.d.answers[name].text for name in "abc"] == [TEXT] * 3
    assert pair.d.answers["b"].end.transfer.num_bytes == 256  # 40 of 44 tokens were here
    assert pair.p.answers["c"].end.cached_tokens == 40
    assert pair.d.answers["c"].end.transfer.num_bytes == 11 * 256  # P's own hits were sent too


def test_a_full_hit_at_d_writes_nothing(make):
    pair = make()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # two blocks, and the token that D computes anyway
    for name in ("a", "b"):
        pair.receive(name, prompt)
        pair.push(name, prompt)
        pair.until(lambda name=name: pair.is_answered(name) and pair.is_settled())

    assert pair.d.answers["b"].ids == [*prompt, EOS]
    assert pair.d.answers["b"].end.transfer is None


def test_a_wrong_byte_at_p_changes_ds_answer(make):
    pair = make(CHUNKED, SMALL)
    pair.push("a", TEXT)
    pair.until(lambda: pair.p.answers["a"].end is not None)
    pair.p.runner.memory.overwrite(3, 100, b"\x00\x01")

    pair.receive("a", TEXT)
    pair.until(lambda: pair.is_answered("a"))

    assert pair.d.answers["a"].text != TEXT


def test_many_requests_at_once_through_small_pools(make):
    pair = make(replace(CHUNKED, num_blocks=40), replace(SMALL, num_blocks=30))
    prompts = {f"r{i}": f"{i:02d} {TEXT[: 5 + i]}" for i in range(20)}
    for name, prompt in prompts.items():
        pair.receive(name, prompt)
        pair.push(name, prompt)

    pair.until(lambda: pair.is_answered(*prompts))

    assert not [answer.end for answer in pair.d.answers.values() if answer.end.error]
    assert {name: pair.d.answers[name].text for name in prompts} == prompts
    pair.until(pair.is_settled)


def test_an_abort_at_d_in_every_state_frees_both_sides(make):
    pair = make(CHUNKED, SMALL)
    seen = set()
    for num_steps in range(7):
        name = f"r{num_steps}"
        pair.receive(name, TEXT + name, ignore_eos=True)
        pair.push(name, TEXT + name)
        pair.p.until_begun(name)
        if num_steps == 6:
            pair.until(lambda name=name: len(pair.d.answers[name].ids) > 2)
        for _ in range(num_steps % 6):
            pair.p.step()
            pair.d.step()
        seen.add(pair.d.core.scheduler.state_of(f"{name}:1:1"))
        pair.d.abort(name)
        pair.until(pair.is_settled)
        assert pair.d.answers[name].num_released == 1
        assert pair.d.answers[name].end is None
    assert {State.WAITING, State.WAITING_FOR_REMOTE_KVS, State.RUNNING} <= seen


def test_an_abort_at_p_in_every_state_frees_both_sides_and_d_reports_it(make):
    pair = make(CHUNKED, SMALL)
    for num_steps in range(7):
        name = f"r{num_steps}"
        pair.push(name, TEXT + name)
        pair.p.step(num_steps)
        if num_steps % 2:
            pair.receive(name, TEXT + name)
            pair.d.step()
        pair.p.abort(name)
        if not num_steps % 2:
            pair.receive(name, TEXT + name)
        pair.until(lambda name=name: pair.is_answered(name) and pair.is_settled())
        assert pair.p.answers[name].num_released == 1
        assert pair.p.answers[name].end or pair.d.answers[name].end.error.startswith("kv_transfer_failed: ")


def test_a_hundred_rounds_of_abort_and_reuse(make):
    pair = make(replace(CHUNKED, num_blocks=16), replace(SMALL, num_blocks=16))
    for turn in range(100):
        doomed, name = f"x{turn}", f"r{turn}"
        for who in (doomed, name):
            pair.receive(who, f"{who} {TEXT[:20]}")
            pair.push(who, f"{who} {TEXT[:20]}")
        pair.p.until_begun(doomed)
        for _ in range(turn % 4):
            pair.p.step()
            pair.d.step()
        (pair.p if turn % 2 else pair.d).abort(doomed)
        pair.until(lambda name=name: pair.is_answered(name))
        assert pair.d.answers[name].text == f"{name} {TEXT[:20]}"
    pair.until(pair.is_settled)


def test_p_preempted_in_the_middle_of_a_push_writes_everything_again(make):
    pair = make(replace(CHUNKED, num_blocks=14, watermark_blocks=1), SMALL)
    pair.p.submit(request("local", "12345", ignore_eos=True, max_tokens=36))  # older: it grows at the push's expense
    pair.p.step(2)
    pair.receive("a", TEXT[:30])
    pair.push("a", TEXT[:30])
    pair.transports[0].slow_s = 0.002

    pair.until(lambda: pair.is_answered("a"))

    assert pair.p.core.scheduler.num_preemptions > 0
    assert pair.d.answers["a"].text == TEXT[:30]
    pair.until(pair.is_settled)


def test_d_preempted_after_a_push_computes_again(make):
    pair = make(SMALL, replace(SMALL, num_blocks=24, watermark_blocks=1))
    for name in ("a", "b"):
        pair.receive(name, TEXT[:30] + name)
        pair.push(name, TEXT[:30] + name)
    pair.d.step()
    pair.until(lambda: all(pair.p.answers[name].num_released for name in "ab"), steps_d=False)

    # D has both: they grow side by side.
    pair.until(lambda: pair.is_answered("a", "b") and pair.is_settled())

    assert pair.d.core.scheduler.num_preemptions > 0
    assert [pair.d.answers[name].text for name in "ab"] == [TEXT[:30] + name for name in "ab"]


def test_a_p_that_is_gone_fails_the_request_behind_a_fence(make):
    pair = make(CHUNKED, SMALL, SOON_OVER)
    pair.push("a", TEXT)
    pair.receive("a", TEXT)
    pair.p.step(2)
    pair.d.step()
    pair.p.core.close()

    while not pair.is_answered("a"):
        pair.progress.clear()
        pair.d.step()
        pair.progress.wait(0.05)

    assert pair.d.answers["a"].end.error.startswith("kv_transfer_failed: ")
    assert pair.d.core.pool.num_free == pair.d.num_free_at_start
