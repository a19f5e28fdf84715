"""Whole requests through scheduler and sim runner, without a connector: prefill and decode in one engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.base import PrefillOnly
from engine.embedded.sim_echo import EOS
from pdq.wire.types import FormatKind, OutputFormat
from tests.engine.drive import SMALL, Bench, request

TEXT = "The quick brown fox jumps over the lazy dog"


def test_the_prompt_comes_back_and_ends_with_eos():
    bench = Bench()
    bench.submit(request("a", TEXT))

    answer = bench.run()["a"]

    assert answer.text == TEXT
    assert answer.ids[-1] == EOS
    assert answer.end.finish == "stop"
    assert answer.end.stop_token_id == EOS
    assert answer.num_released == 1


def test_max_tokens_ends_with_length():
    bench = Bench()
    bench.submit(request("a", TEXT, max_tokens=5))

    answer = bench.run()["a"]

    assert (answer.text, answer.end.finish) == (TEXT[:5], "length")


def test_a_stop_token_ends_the_answer_and_is_its_last_token():
    bench = Bench()
    bench.submit(request("a", TEXT, stop_token_ids=(ord("q"),)))

    answer = bench.run()["a"]

    assert (answer.text, answer.end.finish, answer.end.stop_token_id) == ("The q", "stop", ord("q"))


def test_min_tokens_and_ignore_eos_keep_the_echo_going():
    bench = Bench()
    bench.submit(request("a", "abc", min_tokens=5), request("b", "abc", ignore_eos=True, max_tokens=7))

    answers = bench.run()

    assert answers["a"].text == "abcab"
    assert answers["b"].text == "abcabca"
    assert answers["b"].end.finish == "length"


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 100])
def test_chunked_prefill_gives_the_same_answer_at_every_prompt_length(num_tokens: int):
    bench = Bench(replace(SMALL, max_num_batched_tokens=7, max_num_seqs=7))
    prompt = [(7 * i) % 256 for i in range(num_tokens)]
    bench.submit(request("a", prompt))

    assert bench.run()["a"].ids == [*prompt, EOS]
    assert bench.core.pool.num_free == 64


def test_decodes_go_first_and_the_budget_holds():
    bench = Bench(replace(SMALL, max_num_batched_tokens=8, max_num_seqs=4))
    bench.submit(request("short", "ab", ignore_eos=True))
    bench.step(2)
    before = len(bench.answers["short"].ids)
    bench.submit(request("long", "x" * 60))

    bench.step(5)

    assert len(bench.answers["short"].ids) == before + 5
    assert not bench.answers["long"].ids  # 61 tokens at 7 a step
    bench.step(4)
    assert bench.answers["long"].ids


def test_a_migrated_request_goes_on_exactly_where_it_was():
    bench = Bench()
    bench.submit(request("a", TEXT, generated=list(TEXT[:17].encode()), max_tokens=30))

    answer = bench.run()["a"]

    assert answer.text == TEXT[17:30]
    assert answer.end.finish == "length"


def test_a_second_prompt_finds_the_first_ones_blocks():
    bench = Bench()
    bench.submit(request("a", TEXT))
    bench.run()
    bench.submit(request("b", TEXT))

    answer = bench.run()["b"]

    assert answer.text == TEXT
    assert answer.end.cached_tokens == len(TEXT) // 4 * 4  # BOS makes it one longer
    assert bench.core.pool.num_free == 64


def test_prompts_with_a_common_prefix_share_blocks_while_both_run():
    bench = Bench()
    bench.submit(request("a", TEXT + " one", ignore_eos=True, max_tokens=50))
    bench.step(2)
    free = bench.core.pool.num_free
    bench.submit(request("b", TEXT + " two", ignore_eos=True, max_tokens=50))
    bench.step()

    assert free - bench.core.pool.num_free == 1  # of 12
    assert bench.run()["b"].text[: len(TEXT) + 4] == TEXT + " two"


def test_without_prefix_caching_nothing_is_found():
    bench = Bench(replace(SMALL, prefix_caching=False))
    bench.submit(request("a", TEXT))
    bench.run()
    bench.submit(request("b", TEXT))

    assert bench.run()["b"].end.cached_tokens == 0


def test_a_pool_too_small_for_all_preempts_the_youngest_and_all_answers_are_right():
    bench = Bench(replace(SMALL, num_blocks=20))
    prompts = {f"r{i}": f"{i}" * 17 for i in range(6)}
    bench.submit(*(request(name, prompt) for name, prompt in prompts.items()))

    answers = bench.run()

    assert {name: answers[name].text for name in prompts} == prompts
    assert [answers[name].num_released for name in prompts] == [1] * 6
    assert bench.core.scheduler.num_preemptions > 0
    assert bench.core.pool.num_free == 20


def test_a_request_that_fills_the_whole_pool_alone_is_served():
    bench = Bench(replace(SMALL, num_blocks=8))  # 32 tokens
    bench.submit(request("a", "x" * 20, ignore_eos=True), request("b", "y" * 20, ignore_eos=True))

    answers = bench.run()

    assert [len(answers[name].ids) for name in "ab"] == [11, 11]  # 21 + 11 = 32
    assert answers["a"].end.finish == "length"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "the prompt is empty"),
        ([300], "token id 300 is outside the vocabulary of 258"),
        ([1] * 256, "256 tokens leave no room to generate: this engine's limit is 256"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(prompt: list[int], reason: str):
    bench = Bench()
    bench.submit(request("a", prompt))

    answer = bench.run()["a"]

    assert answer.end.error == f"engine_error: {reason}"
    assert answer.num_released == 1


def test_an_output_format_is_refused_instead_of_ignored():
    bench = Bench()
    bench.submit(request("a", "abc", output_format=OutputFormat(kind=FormatKind.JSON_OBJECT)))

    assert bench.run()["a"].end.error == "unsupported: the embedded engine knows no output formats"


def test_kv_transfer_without_a_connector_is_refused():
    bench = Bench()
    bench.submit(request("a", "abc", kv=PrefillOnly()))

    assert "without a connector" in bench.run()["a"].end.error


def test_aborts_waiting_and_running_give_everything_back_and_nothing_follows():
    bench = Bench(replace(SMALL, max_num_seqs=1))
    bench.submit(request("running", TEXT, ignore_eos=True), request("waiting", TEXT))
    bench.step(3)
    num_tokens = len(bench.answers["running"].ids)

    bench.abort("waiting")
    bench.abort("running")
    bench.abort("nobody")
    answers = bench.run()

    assert len(answers["running"].ids) == num_tokens
    assert answers["running"].end is None
    assert [answers[name].num_released for name in ("running", "waiting")] == [1, 1]
    assert "nobody" not in answers
    assert bench.core.pool.num_free == 64


def test_a_preempted_request_can_be_aborted():
    bench = Bench(replace(SMALL, num_blocks=12, watermark_blocks=1))
    bench.submit(*(request(name, name * 15, ignore_eos=True) for name in "ab"))
    while bench.core.scheduler.num_preemptions == 0:
        bench.step()

    bench.abort("b")
    answers = bench.run()

    assert answers["b"].num_released == 1
    assert answers["a"].end.finish == "length"


def test_logprobs_come_with_each_token_and_prompt_logprobs_once_and_complete():
    bench = Bench(replace(SMALL, max_num_batched_tokens=5, max_num_seqs=5))
    bench.submit(request("first", TEXT), request("a", TEXT, logprobs=2, prompt_logprobs=1, max_tokens=3))

    answer = bench.run()["a"]

    assert [entry.token_id for entry in answer.logprobs] == list(TEXT[:3].encode())
    assert [len(entry.top_ids) for entry in answer.logprobs] == [2, 2, 2]
    assert answer.prompt_logprobs[0] is None
    assert [entry.token_id for entry in answer.prompt_logprobs[1:]] == list(TEXT.encode())


def test_one_wrong_byte_anywhere_in_a_block_that_is_read_changes_the_answer():
    for offset in range(0, 4 * 64, 37):
        bench = Bench()
        bench.submit(request("a", TEXT))
        bench.run()
        block_id = bench.core.pool.find_prefix(bench.first_hashes(TEXT))[0]
        original = bench.runner.memory.read(block_id)
        bench.runner.memory.overwrite(block_id, offset, bytes([original[offset] ^ 1]))
        bench.submit(request("b", TEXT))

        answer = bench.run()["b"]

        assert answer.text != TEXT
        assert answer.end.finish == "stop"


def test_a_stray_write_while_decoding_is_noticed():
    bench = Bench()
    bench.submit(request("a", TEXT))
    bench.step(3)
    bench.runner.memory.overwrite(0, 5, b"?")

    assert bench.run()["a"].text != TEXT


def test_idle_and_blocked_engines_are_not_busy():
    bench = Bench(replace(SMALL, num_blocks=8))
    assert not bench.core.is_busy
    bench.submit(request("a", TEXT[:20]))
    bench.run()
    assert not bench.core.is_busy


def test_directives_work_only_when_switched_on():
    off, on = Bench(), Bench(replace(SMALL, sim_directives=True))
    for bench in (off, on):
        bench.submit(request("a", "!slow=0 !eos=3 hello"))

    assert off.run()["a"].text == "!slow=0 !eos=3 hello"
    assert on.run()["a"].text == "!sl"
