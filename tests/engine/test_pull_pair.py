"""P and D as two cores in one process, joined by the real connector halves over the memory transport."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from engine.base import LoadKv, PrefillOnly
from engine.embedded.request import State
from engine.embedded.sim_echo import EOS
from pdq.wire.types import KvTicket, unpack_ids
from tests.engine.drive import PATIENT, SMALL, Bench, request

TEXT = "The quick brown fox jumps over the lazy dog"


class Pair:
    """Steps P and D in turn until a condition holds; sleeps only until a connector thread reports something."""

    def __init__(self, p_settings=SMALL, d_settings=SMALL) -> None:
        fabric = MemoryFabric()
        self.progress = threading.Event()
        self.p, self.d = (
            Bench(
                settings,
                connector=PATIENT,
                transport=lambda _: MemoryTransport(fabric),
                role=role,
                on_progress=self.progress.set,
            )
            for settings, role in ((p_settings, "producer"), (d_settings, "consumer"))
        )

    def until(self, condition, limit_s: float = 40.0) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.progress.clear()
            self.p.step()
            self.d.step()
            if condition():
                return
            if not (self.p.core.is_busy or self.d.core.is_busy):
                self.progress.wait(0.01)
        raise AssertionError(f"not reached: P {self.p.core.stats()}, D {self.d.core.stats()}")

    def prefill(self, name: str, prompt, **options) -> KvTicket:
        self.p.submit(request(name, prompt, kv=PrefillOnly(), **options))
        self.until(lambda: self.p.answers[name].end is not None)
        ticket = self.p.answers[name].end.ticket
        assert ticket is not None
        return ticket

    def is_settled(self) -> bool:
        return all(bench.core.pool.num_free == bench.num_free_at_start for bench in (self.p, self.d))

    def close(self) -> None:
        self.d.core.close()
        self.p.core.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def test_d_reads_what_p_computed_and_both_pools_are_back_at_the_start(pair: Pair):
    ticket = pair.prefill("a", TEXT)
    assert pair.p.core.stats().pinned == 1
    pair.d.submit(request("a", TEXT, kv=LoadKv(ticket=ticket)))

    pair.until(lambda: pair.d.answers["a"].end is not None)
    answer = pair.d.answers["a"]

    assert (answer.text, answer.end.finish) == (TEXT, "stop")
    assert answer.end.transfer.num_bytes == -(-(len(TEXT) + 1) // 4) * 256
    assert answer.end.transfer.num_descriptors == 1  # a fresh prompt's blocks are neighbours on both sides
    pair.until(pair.is_settled)
    assert pair.p.answers["a"].num_released == 1
    assert answer.num_released == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 63])
def test_prompts_of_all_lengths_around_block_borders(pair: Pair, num_tokens: int):
    prompt = [(11 * i) % 256 for i in range(num_tokens)]
    ticket = pair.prefill("a", prompt)
    pair.d.submit(request("a", prompt, kv=LoadKv(ticket=ticket)))

    pair.until(lambda: pair.d.answers["a"].end is not None)

    assert pair.d.answers["a"].ids == [*prompt, EOS]
    pair.until(pair.is_settled)


def test_a_wrong_byte_at_p_changes_ds_answer(pair: Pair):
    ticket = pair.prefill("a", TEXT)
    block_id = unpack_ids(ticket.block_ids)[3]
    pair.p.runner.memory.overwrite(block_id, 100, b"\x00\x01")
    pair.d.submit(request("a", TEXT, kv=LoadKv(ticket=ticket)))

    pair.until(lambda: pair.d.answers["a"].end is not None)

    assert pair.d.answers["a"].text != TEXT


def test_many_requests_at_once_through_small_pools():
    pair = Pair(replace(SMALL, num_blocks=40), replace(SMALL, num_blocks=30))
    prompts = {f"r{i}": f"{i:02d} {TEXT[: 5 + i]}" for i in range(20)}
    waiting = dict(prompts)

    def drive() -> bool:
        while waiting and pair.p.core.stats().waiting == 0:
            name = next(iter(waiting))
            pair.p.submit(request(name, waiting.pop(name), kv=PrefillOnly()))
        for name, prompt in prompts.items():
            end = pair.p.answers[name].end
            if end is not None and end.ticket is not None and name not in handed:
                handed.add(name)
                pair.d.submit(request(name, prompt, kv=LoadKv(ticket=end.ticket)))
        return all(pair.d.answers[name].end is not None for name in prompts)

    handed: set[str] = set()
    pair.until(drive)

    assert not [answer.end for answer in pair.d.answers.values() if answer.end.error]
    assert {name: pair.d.answers[name].text for name in prompts} == prompts
    pair.until(pair.is_settled)
    pair.close()


def test_d_uses_its_own_prefix_blocks_and_reads_only_the_rest(pair: Pair):
    for name in ("a", "b"):
        ticket = pair.prefill(name, TEXT)
        pair.d.submit(request(name, TEXT, kv=LoadKv(ticket=ticket)))
        pair.until(lambda name=name: pair.d.answers[name].end is not None)

    second = pair.d.answers["b"]

    assert second.text == TEXT
    assert second.end.cached_tokens == 44 - 4  # 44 tokens, never up to the last one
    assert second.end.transfer.num_bytes == 256
    pair.until(pair.is_settled)


def test_a_released_prefill_frees_its_blocks_and_a_late_reader_gets_an_error(pair: Pair):
    ticket = pair.prefill("a", TEXT)

    pair.p.release("a")
    pair.until(lambda: pair.p.answers["a"].num_released == 1)
    pair.d.submit(request("a", TEXT, kv=LoadKv(ticket=ticket)))
    pair.until(lambda: pair.d.answers["a"].end is not None)

    assert pair.d.answers["a"].end.error.startswith("kv_transfer_failed: ")
    pair.until(pair.is_settled)
    assert pair.d.answers["a"].num_released == 1


def test_an_abort_at_d_in_every_state_frees_both_sides(pair: Pair):
    seen = set()
    for num_steps in range(5):
        name = f"r{num_steps}"
        ticket = pair.prefill(name, TEXT + name)
        pair.d.submit(request(name, TEXT + name, kv=LoadKv(ticket=ticket), ignore_eos=True))
        if num_steps == 4:
            pair.until(lambda name=name: len(pair.d.answers[name].ids) > 2)
        else:
            pair.d.step(num_steps)
        seen.add(pair.d.core.scheduler.state_of(f"{name}:1:1"))
        pair.d.abort(name)
        pair.until(pair.is_settled)
        assert pair.d.answers[name].num_released == 1
        assert pair.d.answers[name].end is None
    assert {State.WAITING, State.WAITING_FOR_REMOTE_KVS, State.RUNNING} <= seen


def test_an_abort_at_p_while_it_prefills_or_is_pinned(pair: Pair):
    pair.p.submit(request("a", TEXT, kv=PrefillOnly()))
    pair.p.abort("a")
    pair.prefill("b", TEXT)
    pair.p.abort("b")

    pair.until(pair.is_settled)

    assert [pair.p.answers[name].num_released for name in "ab"] == [1, 1]
    assert pair.p.answers["a"].end is None
