"""Prompts and reference outputs for parity checks: what transformers' own `generate` answers, kept beside the cache.

Used by the runner's tests and by whole-pipeline parity: the same prompts through gateway, queue, P and D must give
`reference_generate(...)` token for token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from engine.embedded.weights_digest import weights_digest

_TEXT = (
    "the river a small engine moves blocks of memory between two workers and then waits for light under an old bridge "
    "while children count seven stones in water because every answer needs one question more than it has words"
)


def parity_prompts(model_dir: Path, count: int, *, block_size: int = 16, long_tokens: int = 3000) -> list[list[int]]:
    """`count` (at least 8) prompts as token ids: one token; around the block size; a long one; two with a long common
    prefix; one twice; then texts and chats of mixed lengths. Deterministic."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    prefix = ids(_text(seed=90, num_words=150))
    prompts = [
        ids("Once")[:1],
        *(
            ids(_text(seed=size, num_words=4 * block_size))[:size]
            for size in (block_size - 1, block_size, block_size + 1)
        ),
        ids(_text(seed=7, num_words=2 * long_tokens))[:long_tokens],
        prefix + ids(" The first reason is"),
        prefix + ids(" In the second place, he"),
        ids(_text(seed=3, num_words=20)),
        ids(_text(seed=3, num_words=20)),
    ]
    for index in range(len(prompts), count):
        text = _text(seed=100 + index, num_words=3 + index * 7 % 60)
        if index % 2:
            text = f"<|im_start|>user\nWhat comes to mind: {text}?<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(ids(text))
    return prompts[:count]


def reference_generate(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, cache_dir: Path | None = None
) -> list[list[int]]:
    """Greedy tokens of `generate` in float32, one prompt at a time, ending with EOS where it comes.

    Kept in a JSON file per model under `cache_dir` (default: beside the model's folder), so that only new prompts cost.
    """
    path = (cache_dir or model_dir.parent) / f"reference-{model_dir.name}-{_versions(model_dir)}.json"
    known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
    keys = [_key(prompt, max_tokens) for prompt in prompts]
    missing = {key: list(prompt) for key, prompt in zip(keys, prompts, strict=True) if key not in known}
    if missing:
        known |= _generate(model_dir, missing, max_tokens)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(known))
        partial.replace(path)
    return [known[key] for key in keys]


def _generate(model_dir: Path, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True).eval()
    found = {}
    for key, prompt in prompts.items():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, use_cache=True
        )
        found[key] = output[0, len(prompt) :].tolist()
    return found


def _text(*, seed: int, num_words: int) -> str:
    known = _TEXT.split()
    state, words = seed * 7919 + 1, []
    for index in range(num_words):
        state = (state * 1103515245 + 12345) % 2**31
        words.append(known[(state >> 16) % len(known)] + ("." if index % 11 == 10 else ""))
    return " ".join(words).capitalize()


def _key(prompt: Sequence[int], max_tokens: int) -> str:
    return hashlib.sha256(f"{max_tokens}:{','.join(map(str, prompt))}".encode()).hexdigest()[:24]


def _versions(model_dir: Path) -> str:
    from importlib.metadata import version

    return f"{weights_digest(model_dir)}-torch{version('torch')}-transformers{version('transformers')}"
