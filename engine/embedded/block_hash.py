"""Names of block contents: a full block's hash covers its own tokens and, through the chain, all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from pdq.wire.types import pack_ids

_ROOT = b"pdq block chain"


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Appends to `hashes` (one per full block, from block 0) until all full blocks of `num_tokens` have one."""
    parent = hashes[-1] if hashes else _ROOT
    for start in range(len(hashes) * block_size, num_tokens - block_size + 1, block_size):
        parent = blake2b(pack_ids(token_ids[start : start + block_size]), digest_size=16, key=parent).digest()
        hashes.append(parent)
