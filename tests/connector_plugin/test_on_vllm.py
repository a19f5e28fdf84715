"""The plugin inside real vLLM: two engines, KV in both modes, and what must not stop either of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.vllm_plugin.hooks import misfits, unknown_hooks
from tests.connector_plugin.engine_pair import LIMIT_S, EnginePair
from tests.connector_plugin.record_hooks import facts_from, read_folder, recorded
from tests.vllm.prompts import AT_ONCE, LONG
from tests.vllm.reference import BLOCK_SIZE, Reference, reference

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # the first test waits for two engines

modes = pytest.mark.parametrize("mode", ["pull", "push"])


@pytest.fixture(scope="module")
def model_dir() -> Path:
    from engine.models.__main__ import default_cache_dir
    from engine.models.store import prepare_model

    return prepare_model("smollm2-135m", default_cache_dir())


@pytest.fixture(scope="module")
def answers(model_dir: Path) -> Reference:
    return reference(model_dir)


@pytest.fixture(scope="module")
def engines(model_dir: Path, answers: Reference) -> Iterator[EnginePair]:
    pair = EnginePair(model_dir)
    yield pair
    pair.close()


@pytest.fixture
def all_loads_succeed(engines: EnginePair) -> Iterator[None]:
    """Engine "b" would compute the prompt of one that fails, and answer as well."""
    before = engines.news("b")
    yield
    after = engines.news("b")
    assert after.get("failed", {}) == before.get("failed", {})
    assert after["counts"]["tokens_used"] > before.get("counts", {}).get("tokens_used", 0)


def test_this_vllm_calls_the_connector_as_recorded() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    version = (root / "_version.py").read_text().partition("__version__ = version = '")[2].partition("'")[0]
    facts = facts_from(read_folder(root.parent))

    assert misfits(facts["classes"], version) == []
    assert unknown_hooks(facts["classes"], [name for calls in facts["calls"].values() for name in calls]) == []
    if (known := recorded().get(version.partition("+")[0])) is not None:
        assert facts == known


def test_importing_the_plugin_starts_nothing(engines: EnginePair) -> None:
    """vLLM's API process uses the classes without instances. vLLM finds them by name as well."""
    assert engines.ask("facts_of_import") == {"mooncake": False, "new_threads": 0, "found": True}


@modes
@pytest.mark.usefixtures("all_loads_succeed")
def test_answers_are_those_of_a_single_engine(engines: EnginePair, answers: Reference, mode: str) -> None:
    """One by one; the long prompt's prefill takes several steps."""
    engines.forget_prefixes()
    for index in (1, 2, 3, 4, LONG) if mode == "pull" else (2, 4, LONG):
        found = engines.through_both(answers.prompts[index], mode).result(LIMIT_S)
        assert (index, found["finish"], found["ids"]) == (index, "length", answers.outputs[index])


@modes
@pytest.mark.usefixtures("all_loads_succeed")
def test_answers_of_eight_requests_at_once_are_those_of_a_single_engine(
    engines: EnginePair, answers: Reference, mode: str
) -> None:
    engines.forget_prefixes()
    found = [engines.through_both(answers.prompts[index], mode) for index in AT_ONCE]

    assert [answer.result(LIMIT_S)["ids"] for answer in found] == [answers.outputs[index] for index in AT_ONCE]


@modes
@pytest.mark.usefixtures("all_loads_succeed")
def test_blocks_at_d_hold_the_bytes_of_those_at_p(engines: EnginePair, answers: Reference, mode: str) -> None:
    """All but the last one, in which D goes on writing."""
    prompt = [*answers.prompts[12][::-1], *answers.prompts[11 if mode == "pull" else 10]]  # blocks that nobody has yet
    prompt = prompt if mode == "pull" else prompt[::-1]
    engines.forget_prefixes()
    before = {engine: set(engines.ask("digests", engine=engine)) for engine in ("a", "b")}
    name, push = engines.new_name(), mode == "push"
    prefill = engines.prefill(name, prompt, push=push)
    kv = engines.pushed_by("a", name) if push else prefill.result(LIMIT_S)["kv"]
    engines.decode(name, prompt, kv, max_tokens=2).result(LIMIT_S)
    engines.wait_until_released("a", f"p-{name}")

    at_p, at_d = (set(engines.ask("digests", engine=engine)) - before[engine] for engine in ("a", "b"))
    whole_blocks = len(prompt) // BLOCK_SIZE
    assert len(at_p) >= whole_blocks
    assert len(at_p & at_d) >= whole_blocks - 1


@modes
def test_d_computes_the_prompt_itself_when_its_logprobs_are_wanted(
    engines: EnginePair, answers: Reference, mode: str
) -> None:
    found = engines.through_both(answers.prompts[12], mode, prompt_logprobs=0).result(LIMIT_S)

    assert found["has_prompt_logprobs"]
    assert found["ids"] == answers.outputs[12]


@pytest.mark.parametrize("to", ["a", "b"], ids=["fail", "recompute"])
def test_a_failed_load_ends_as_the_policy_says(engines: EnginePair, answers: Reference, to: str) -> None:
    """P has freed the blocks. D has nothing else to do, and goes on by itself."""
    name, at, prompt = engines.new_name(), "b" if to == "a" else "a", answers.prompts[12]
    engines.forget_prefixes()
    kv = engines.prefill(name, prompt, push=False, at=at).result(LIMIT_S)["kv"]
    engines.release(name, at=at)
    engines.wait_until_released(at, f"p-{name}")

    found = engines.decode(name, prompt, kv, at=to).result(LIMIT_S)

    expected = ("error", []) if to == "a" else ("length", answers.outputs[12])
    assert (found["finish"], found["ids"]) == expected
    assert "gone" in engines.news(to)["failed"][f"d-{name}"]
    engines.wait_until_released(to, f"d-{name}")


def test_bad_kv_params_fail_the_request_and_not_the_engine(engines: EnginePair, answers: Reference) -> None:
    name = engines.new_name()

    found = engines.decode(name, answers.prompts[12], {"do_remote_prefill": True}, at="a").result(LIMIT_S)

    assert found["finish"] == "error"
    assert "kv params" in engines.news("a")["failed"][f"d-{name}"]


@modes
def test_aborts_in_any_state_leave_both_engines_serving(engines: EnginePair, answers: Reference, mode: str) -> None:
    """P in mid-prefill, D before it has its KV, D while it decodes; each is released."""
    push, long = mode == "push", answers.prompts[LONG]
    engines.forget_prefixes()

    doomed = engines.new_name()
    prefill = engines.prefill(doomed, long, push=push)
    if push:
        engines.decode(doomed, long, engines.pushed_by("a", doomed))
    engines.wait_for_blocks("a")
    engines.ask("abort", engine="a", request_id=f"p-{doomed}")
    assert prefill.result(LIMIT_S)["finish"] == "abort"
    engines.wait_until_released("a", f"p-{doomed}")
    if push:  # D computes it itself then
        engines.ask("abort", engine="b", request_id=f"d-{doomed}")
        engines.wait_until_released("b", f"d-{doomed}")

    for is_decoding in (False, True):
        engines.forget_prefixes()
        name, num_tokens = engines.new_name(), engines.ask("figures", engine="b")["tokens"]
        prefill = engines.prefill(name, long, push=push)
        kv = engines.pushed_by("a", name) if push else prefill.result(LIMIT_S)["kv"]
        decode = engines.decode(name, long, kv, max_tokens=500, ignore_eos=True)
        if push:
            engines.wait_for_blocks("a")  # a push that is cancelled before P has begun it waits for another reader
        if is_decoding:
            engines.wait_for_token("b", after=num_tokens)
        engines.ask("abort", engine="b", request_id=f"d-{name}")
        assert decode.result(LIMIT_S)["finish"] == "abort"
        engines.wait_until_released("b", f"d-{name}")
        engines.wait_until_released("a", f"p-{name}")


def test_a_request_that_d_refuses_lets_p_go_at_once(engines: EnginePair, answers: Reference) -> None:
    name = engines.new_name()
    kv = engines.prefill(name, answers.prompts[12], push=False).result(LIMIT_S)["kv"]
    engines.ask("reject", engine="b", request_id=f"d-{name}", kv=kv | {"pdq_engine_request_id": f"d-{name}"})

    engines.wait_until_released("a", f"p-{name}")
    engines.wait_until_released("b", f"d-{name}")


@modes
def test_preempted_requests_answer_as_if_nothing_had_happened(
    engines: EnginePair, answers: Reference, mode: str
) -> None:
    """P in mid-prefill, D in mid-decode: vLLM takes all blocks away from what runs."""
    engines.forget_prefixes()
    before = {engine: engines.ask("figures", engine=engine) for engine in ("a", "b")}
    name, push, prompt, expected = engines.new_name(), mode == "push", answers.prompts[LONG], answers.outputs[LONG]
    options = {"max_tokens": 5 * len(expected), "ignore_eos": True}
    prefill = engines.prefill(name, prompt, push=push)
    decode = engines.decode(name, prompt, engines.pushed_by("a", name), **options) if push else None
    engines.wait_for_blocks("a")
    engines.ask("reset", engine="a", running=True)
    if decode is None:
        decode = engines.decode(name, prompt, prefill.result(LIMIT_S)["kv"], **options)
    engines.wait_for_token("b", after=before["b"]["tokens"])
    engines.ask("reset", engine="b", running=True)

    assert decode.result(LIMIT_S)["ids"][: len(expected)] == expected
    for engine in ("a", "b"):
        assert engines.ask("figures", engine=engine)["preemptions"] == before[engine]["preemptions"] + 1
    engines.wait_until_released("a", f"p-{name}")
    engines.wait_until_released("b", f"d-{name}")


def test_in_the_end_all_is_free_and_released_once(engines: EnginePair) -> None:
    for engine in ("a", "b"):
        engines.ask("check_health", engine=engine)
        released = engines.news(engine)["released"]
        assert len(released) == len(set(released))
        assert "fatal" not in engines.news(engine)
    engines.forget_prefixes()
    for engine in ("a", "b"):
        engines.wait_for("an empty pool", lambda name=engine: engines.ask("figures", engine=name)["usage"] == 0)
