"""What the simulated model says: its prompt once, then EOS. And directives at a prompt's start.

!eos=K      ends after K tokens
!crash      the engine process dies when it first computes this prompt
!slow=MS    every step with this request takes MS milliseconds more
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdq.wire.types import SamplingParams, TokenLogprob

BOS: Final = 256
EOS: Final = 257
VOCAB_SIZE: Final = 258
_DIRECTIVE: Final = re.compile(rb"!(eos|slow)=(\d{1,9}) |!(crash) ")
_SPACE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Directives:
    eos_after: int | None = None
    is_crash: bool = False
    slow_ms: int = 0


def read_directives(prompt_ids: list[int]) -> Directives:
    """Any number of them, one after the other; the first that isn't one ends them. BOS in front is skipped."""
    text = bytes(token for token in prompt_ids[:200] if token < 256)
    values: dict[bytes, int] = {}
    position = 0
    while found := _DIRECTIVE.match(text, position):
        values[found[1] or found[3]] = int(found[2] or 1)
        position = found.end()
    return Directives(eos_after=values.get(b"eos"), is_crash=b"crash" in values, slow_ms=values.get(b"slow", 0))


class Echo:
    """The answer to one prompt. Depends on nothing but the prompt, so it goes on exactly after a migration."""

    def __init__(self, prompt_ids: list[int], sampling: SamplingParams, directives: Directives) -> None:
        self._text = [token for token in prompt_ids if token < 256]
        self._length = len(self._text) if directives.eos_after is None else directives.eos_after
        self._sampling = sampling

    def token(self, index: int, damage: int) -> int:
        """Generated token number `index`. With damaged KV bytes it is another one than with right bytes."""
        is_over = index >= self._length and index >= self._sampling.min_tokens and not self._sampling.ignore_eos
        if is_over and (index > self._length or not damage):
            return EOS
        right = self._text[index % len(self._text)] if self._text else _SPACE
        return (right + 1 + damage % 255) % 256 if damage else right


def fake_logprob(token_id: int, position: int, num_top: int) -> TokenLogprob:
    """Deterministic, plausible, meaningless. The token itself is the most likely one."""
    logprob = -((token_id * 7 + position) % 100) / 100
    return TokenLogprob(
        token_id=token_id,
        logprob=logprob,
        top_ids=tuple((token_id + rank) % VOCAB_SIZE for rank in range(num_top)),
        top_logprobs=tuple(logprob - 1.5 * rank for rank in range(num_top)),
    )
