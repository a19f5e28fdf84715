"""Prompts whose greedy answers depend on what stands far back in them.

A small tale, the same sentences in another order each time, of which the beginning comes once more: the model goes on
with it. A block of KV that is missing or foreign is seen in the answer; a loop over the last words would hide it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

LONG: Final = 5
"""Index of the prompt of 1,500 tokens."""
AT_ONCE: Final = range(6, 14)
"""Eight to send together: a common prefix twice, one prompt twice, mixed lengths."""
SPARE: Final = range(16, 24)
"""More, of 895 tokens: one below 28 blocks. Each for one test, so that no prefix cache knows it."""
SPARE_LONG: Final = 24
"""The same of 1,500 tokens."""
SPARE_SHORT: Final = 25
"""The same of 379 tokens: 12 blocks."""
_SENTENCES: Final = (
    "The old harbour wakes before the sun, when the first boats come back with silver fish.",
    "Marta sells bread on the corner of the market, and everybody knows her by her red scarf.",
    "In the clock tower lives an owl that sleeps through every bell.",
    "Two engineers argued for a week about the width of the new bridge.",
    "The librarian keeps a list of books that nobody has ever returned.",
    "On Tuesdays the school orchestra plays in the garden behind the town hall.",
    "A letter from Lisbon arrived thirty years too late, and it was still welcome.",
    "The baker's daughter wants to study volcanoes, far away from any flour.",
    "Rain fell for nine days, and on the tenth the river took the wooden stairs.",
    "Doctor Hansen paints small pictures of lighthouses and gives them to her patients.",
    "The train to the mountains leaves at seven, but only if the driver has had coffee.",
    "Nobody remembers who planted the orange trees along the city wall.",
    "Every winter the children build a castle of snow that lasts until March.",
    "The fisherman's dog can count to five, or so the fisherman says.",
    "An inventor from the north offered the mayor a machine that folds umbrellas.",
    "The museum owns one famous painting and a great many chairs.",
    "When the power failed, the whole street met in the kitchen of the hotel.",
    "A blue bicycle has been leaning against the fountain since last summer.",
    "The judge grows tomatoes and lets no lawyer speak of anything else at lunch.",
    "Far out at sea a ship with yellow sails waited for a better wind.",
)


def prompts(model_dir: Path) -> list[list[int]]:
    """One token; 31, 32 and 33 tokens; 8 blocks; 1,500 tokens; then eight for one go; a chat; one a second time."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def begun_again(seed: int, num_tokens: int, *, part: float = 0.6) -> list[int]:
        """`part`: share of the tale, before it begins again."""
        text = ids(" ".join(random.Random(seed).sample(_SENTENCES, k=len(_SENTENCES))))[: int(num_tokens * part)]
        return (text * (num_tokens // len(text) + 1))[:num_tokens]

    prefix = begun_again(50, 150)
    twice = begun_again(60, 97)
    return [
        ids("Monday")[:1],
        begun_again(1, 31),
        begun_again(2, 32),
        begun_again(3, 33),
        begun_again(4, 256),
        begun_again(5, 1500, part=0.8),
        prefix + prefix[40:48],
        prefix + prefix[10:18],
        twice,
        twice,
        begun_again(9, 20),
        begun_again(10, 64),
        begun_again(11, 128, part=0.8),
        begun_again(12, 333, part=0.9),
        ids("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"),
        begun_again(4, 256),
        *(begun_again(seed, 895, part=0.8) for seed in range(20, 28)),
        begun_again(30, 1500, part=0.8),
        begun_again(31, 379, part=0.8),
    ]
