"""pdq against vLLM's own MooncakeConnector: the same vLLM engines, model, prompts and machine, in one run.

    python -m benchmarks.vllm_side_by_side [--rounds 3] [--requests 6] [--upstream-in-the-core]

Three pairs of engines are up all the time (about 15 GB), and one of them works at a time: vLLM's pair, pdq pull, pdq
push. A round asks each pair for the same prompts, one after the other, in three lengths; the order of the pairs changes
with the round. Answers must be equal, token for token. A request that a pair answers with an error is counted and asked
again. `--upstream-in-the-core` gives vLLM's pair, too, the executor that pdq chooses on a CPU (ADR 23).

Hand-over: from the end of the prefill (in P's engine core, see timed_connectors.py) to the event with the first token
at the client. In it is one forward pass of D, so D's step time is shown beside it. vLLM's pair has no router: the
client sends both halves at once, which costs it nothing. pdq's side has all its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from benchmarks import vllm_pdq, vllm_upstream
from benchmarks.prefill_times import PrefillTimes
from benchmarks.token_stream import Streamed
from engine.models.__main__ import default_cache_dir
from engine.models.store import prepare_model

MODEL: Final = "smollm2-135m"
LENGTHS: Final = (128, 512, 1500)
"""Prompt tokens."""
MAX_TOKENS: Final = 8
MAX_ERRORS: Final = 3
"""Of a pair, per round and length."""
MODES: Final[Mapping[str, Literal["pull", "push"]]] = {"pdq pull": "pull", "pdq push": "push"}
PAIRS: Final = ("vLLM", *MODES)
ENGINE_ARGS: Final = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "512"),
    *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching"),
    "--enforce-eager",
)
IN_THE_CORE: Final = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
ENVIRON: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "MC_FORCE_TCP": "1",
}


class Pair(Protocol):
    async def ask(self, prompt: list[int], max_tokens: int) -> Streamed: ...


@dataclass(slots=True, kw_only=True)
class Arm:
    name: str
    pair: Pair
    times: PrefillTimes


@dataclass(slots=True, kw_only=True)
class Figures:
    """Seconds, one entry per request."""

    hand_over: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    num_errors: int = 0


async def ask(arm: Arm, prompt: list[int], figures: Figures) -> list[int]:
    try:
        answer = await arm.pair.ask(prompt, MAX_TOKENS)
    except RuntimeError as error:
        figures.num_errors += 1
        print(f"{arm.name}: {error}", flush=True)
        if figures.num_errors > MAX_ERRORS:
            raise
        arm.times.only_new(len(prompt))
        return await ask(arm, prompt, figures)
    figures.hand_over.append(answer.token_at[0] - arm.times.only_new(len(prompt)))
    figures.first_token.append(answer.first_token_s)
    figures.step.append(answer.step_s)
    return answer.token_ids


async def one_round(arms: list[Arm], prompts: list[list[int]]) -> dict[str, Figures]:
    """Raises RuntimeError when the answers differ."""
    figures = {arm.name: Figures() for arm in arms}
    answers = {arm.name: [await ask(arm, prompt, figures[arm.name]) for prompt in prompts] for arm in arms}
    first, *others = answers.items()
    for name, tokens in others:
        if tokens != first[1]:
            raise RuntimeError(f"{name} answers {tokens}, {first[0]} answers {first[1]}")
    return figures


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    """Never twice the same, so nothing is cached."""
    return [rng.randrange(1000, 40000) for _ in range(num_tokens)]


def print_table(rounds: Mapping[int, list[dict[str, Figures]]]) -> None:
    print("\n| prompt tokens | pair | hand-over, ms | to the first | time to first token, ms | D's step, ms | errors |")
    print("|---|---|---|---|---|---|---|")
    for length, all_figures in rounds.items():
        base = next(iter(all_figures[0]))
        for name in all_figures[0]:
            cells = [
                _spread([statistics.median(getattr(figures[name], part)) * 1000 for figures in all_figures])
                for part in ("hand_over", "first_token", "step")
            ]
            ratios = [
                statistics.median(figures[name].hand_over) / statistics.median(figures[base].hand_over)
                for figures in all_figures
            ]
            num_errors = sum(figures[name].num_errors for figures in all_figures)
            print(f"| {length} | {name} | {cells[0]} | {_spread(ratios, 2)} | {cells[1]} | {cells[2]} | {num_errors} |")


def _spread(values: list[float], digits: int = 1) -> str:
    """Median of the rounds' medians, lowest and highest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="per length, pair and round")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--upstream-in-the-core", action="store_true")
    arguments = parser.parse_args()
    upstream_args = (*ENGINE_ARGS, *(IN_THE_CORE if arguments.upstream_in_the_core else ()))
    model_dir = prepare_model(MODEL, default_cache_dir())
    rng = random.Random(1)
    rounds: dict[int, list[dict[str, Figures]]] = {length: [] for length in LENGTHS}
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = []
        for name in arguments.pairs:
            times = PrefillTimes(folder / f"{name}.times")
            environ = {**_environ(), **times.environ}
            starting = (
                vllm_upstream.running(folder, model_dir, upstream_args, environ)
                if name == "vLLM"
                else vllm_pdq.running(folder, MODEL, MODES[name], ENGINE_ARGS, environ)
            )
            pair: Pair = await stack.enter_async_context(starting)
            arms.append(Arm(name=name, pair=pair, times=times))
            print(f"{name}: up", flush=True)
        for length in LENGTHS:
            await one_round(arms, [prompt_of(rng, length)])  # connections, first batches of this shape
        for number in range(arguments.rounds):
            for length in LENGTHS:
                prompts = [prompt_of(rng, length) for _ in range(arguments.requests)]
                figures = await one_round(arms, prompts)
                rounds[length].append(figures)
                medians = {name: statistics.median(own.hand_over) * 1000 for name, own in figures.items()}
                print(f"round {number + 1}, {length} tokens, hand-over in ms:", end=" ")
                print(", ".join(f"{name} {median:.1f}" for name, median in medians.items()), flush=True)
            arms = arms[1:] + arms[:1]
    print_table(rounds)


def _environ() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PDQ_")}  # noqa: TID251
    return {**inherited, **ENVIRON}


if __name__ == "__main__":
    asyncio.run(main())
