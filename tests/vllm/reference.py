"""Greedy outputs of one plain vLLM engine: what a deployment of several must answer, token for token.

    python -m tests.vllm.reference      # writes greedy.json anew

The file holds what that engine said on one kind of CPU, with one version of vLLM and of the weights. Elsewhere the test
run asks a plain engine itself, once, and keeps the answers beside the model's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.embedded.weights_digest import weights_digest
from engine.models.__main__ import default_cache_dir
from engine.models.store import prepare_model
from tests.vllm.prompts import prompts

MODEL: Final = "smollm2-135m"
BLOCK_SIZE: Final = 32
MAX_TOKENS: Final = 24
ENGINE_ARGS: Final[dict[str, Any]] = {
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "seed": 0,
}
"""Of the single engine and of each engine of a deployment."""
ENVIRON: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
MIN_MARGIN: Final = 1e-2
"""Least distance, in log probability, of the best token from the next one at every step of every answer.

Rounding differs with the shape of a batch by about 1e-5 in float32: a narrower choice would prove nothing.
"""
FIXTURE: Final = Path(__file__).with_name("greedy.json")
_LIMIT_S: Final = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    prompts: list[list[int]]
    outputs: list[list[int]]


def reference(model_dir: Path) -> Reference:
    """From the fixture where it was made for this machine's kind; else asked here, which takes a minute or two."""
    asked = prompts(model_dir)
    key = here(model_dir)
    kept_here = model_dir.parent / f"vllm-greedy-{key['weights']}.json"
    for path in (FIXTURE, kept_here):
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("made_by") == key and [line["prompt"] for line in kept["lines"]] == asked:
            return Reference(prompts=asked, outputs=[line["output"] for line in kept["lines"]])
    print(f"no kept answers for {key}: asking a plain engine", flush=True)
    subprocess.run([sys.executable, "-m", __name__, "--out", str(kept_here)], check=True, timeout=_LIMIT_S)
    lines = json.loads(kept_here.read_text())["lines"]
    return Reference(prompts=asked, outputs=[line["output"] for line in lines])


def here(model_dir: Path) -> dict[str, Any]:
    """Everything that a greedy answer may depend on."""
    from importlib.metadata import version

    import torch

    return {
        "vllm": version("vllm-cpu"),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "weights": weights_digest(model_dir),
        "max_tokens": MAX_TOKENS,
        "engine": ENGINE_ARGS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.reference", description=__doc__)
    parser.add_argument("--out", type=Path, default=FIXTURE, help="file to write (%(default)s)")
    out = parser.parse_args().out
    os.environ.update(ENVIRON)
    model_dir = prepare_model(MODEL, default_cache_dir())
    asked = prompts(model_dir)
    outputs, margin = _ask(model_dir, asked)
    if margin < MIN_MARGIN:
        raise SystemExit(f"two tokens are only {margin:.5f} apart somewhere: take other prompts")
    document = {
        "made_by": here(model_dir),
        "least_margin": round(margin, 5),
        "lines": [{"prompt": prompt, "output": output} for prompt, output in zip(asked, outputs, strict=True)],
    }
    partial = out.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(_pretty(document))
    partial.replace(out)
    print(f"{out}: {len(outputs)} answers, least margin {margin:.4f}")


def _ask(model_dir: Path, asked: list[list[int]]) -> tuple[list[list[int]], float]:
    """One prompt at a time, without prefix cache. Also the least margin."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model_dir),
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        **ENGINE_ARGS,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, detokenize=False)
    outputs, margins = [], []
    for prompt in asked:
        (answer,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        (completion,) = answer.outputs
        outputs.append(list(completion.token_ids))
        pairs = [
            sorted((found.logprob for found in alternatives.values()), reverse=True)[:2]
            for alternatives in completion.logprobs or ()
        ]
        margins.append(min(best - second for best, second in pairs))
    print("margins:", *(f"{margin:.3f}" for margin in margins))
    return outputs, min(margins)


def _pretty(document: dict[str, Any]) -> str:
    """One line per prompt."""
    lines = ",\n".join("    " + json.dumps(line) for line in document["lines"])
    head = json.dumps({**document, "lines": []}, indent=2)
    return head.replace('"lines": []', f'"lines": [\n{lines}\n  ]') + "\n"


if __name__ == "__main__":
    main()
