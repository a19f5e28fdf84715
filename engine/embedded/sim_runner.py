"""The simulated runner: no model. It keeps time by a formula, and its answers depend on every KV byte it reads.

Tokens: bytes 0-255, BOS 256, EOS 257. With right KV bytes it echoes the prompt; a wrong, stale or foreign byte in a
block that it reads changes the answer from there on and is logged as `kv_bytes_wrong`. What is checked when:
- the first time that a request runs here with KV it didn't compute in that step (loaded from P, found in the prefix
  cache): every block it reads. The last one may reach one token further than what counts as computed (D computes the
  prompt's last position again, over P's bytes); a block that holds that position alone is not read.
- each step: `sim_verify_blocks` full blocks of the decoding requests, taking turns.
- when a request ends: every block that it didn't write in this step.
What a step writes: each touched block anew, as far as its tokens are known.
"""

from __future__ import annotations

import os
import time
import zlib
from typing import Final

import structlog

from connector.layout import KvRegion
from engine.embedded.runner import NOT_SAMPLED, Chunk, ChunkResult, LayerHook, RunnerError, TokenSequence
from engine.embedded.settings import EngineSettings
from engine.embedded.sim_chain import Chain
from engine.embedded.sim_echo import EOS, VOCAB_SIZE, Directives, Echo, fake_logprob, read_directives
from engine.embedded.sim_memory import SimMemory
from pdq.wire.types import Capability

CRASH_EXIT_CODE: Final = 99
_log = structlog.get_logger(__name__)


class _SequenceState:
    """What the runner keeps per request, from its first step to its end or preemption."""

    __slots__ = ("chain", "damage", "directives", "echo", "next_check", "num_preemptions")

    def __init__(self, sequence: TokenSequence, chain: Chain, directives: Directives) -> None:
        self.chain = chain
        self.directives = directives
        self.echo = Echo(sequence.token_ids[: sequence.num_prompt_tokens], sequence.sampling, directives)
        self.damage = 0
        self.next_check = 0
        self.num_preemptions = sequence.num_preemptions


class SimRunner:
    """Implements `engine.embedded.runner.Runner`."""

    def __init__(self, settings: EngineSettings, *, is_layer_major: bool = False) -> None:
        """`is_layer_major`: see `SimMemory`. Raises RunnerError."""
        self._is_layer_major = is_layer_major
        self._settings = settings
        self._key = settings.sim_key.encode()
        self._turn = 0
        self.memory: SimMemory | None = None
        if settings.sim_kv_bytes_per_token % (8 * settings.sim_layers):
            raise RunnerError(
                f"sim_kv_bytes_per_token is {settings.sim_kv_bytes_per_token}: must be a multiple of 8 for each of "
                f"the {settings.sim_layers} layers"
            )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({EOS})

    @property
    def max_model_len(self) -> int:
        return self._settings.sim_max_model_len

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def num_layers(self) -> int:
        return self._settings.sim_layers

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        return (Capability.LOGPROBS, Capability.PROMPT_LOGPROBS, Capability.RESUME_EXACT)

    def block_bytes(self, block_size: int) -> int:
        return block_size * self._settings.sim_kv_bytes_per_token

    def allocate(self, num_blocks: int, block_size: int) -> list[KvRegion]:
        try:
            self.memory = SimMemory(
                num_blocks,
                self.block_bytes(block_size),
                num_layers=self.num_layers,
                key=self._key,
                is_layer_major=self._is_layer_major,
            )
        except (MemoryError, OSError) as error:
            raise RunnerError(f"{num_blocks} KV blocks of {self.block_bytes(block_size)} bytes: {error}") from error
        return self.memory.regions()

    def fingerprint(self) -> dict[str, str]:
        settings = self._settings
        return {
            "engine": "sim",
            "layers": str(settings.sim_layers),
            "kv_bytes_per_token": str(settings.sim_kv_bytes_per_token),
            "layout": "layer.block.slot" if self._is_layer_major else "block.layer.slot",
            "key": f"{zlib.crc32(self._key):08x}",
        }

    def close(self) -> None:
        self.memory = None

    def run(self, batch: list[Chunk], before_layer: LayerHook, after_layer: LayerHook) -> list[ChunkResult]:
        started_s = time.perf_counter()
        results = [self._compute(chunk) for chunk in batch]
        self._check_in_turn(batch)
        device_s = self._device_ms(batch) / 1000
        for layer in range(self.num_layers):
            before_layer(layer)
            _sleep_until(started_s + device_s * (layer + 1) / self.num_layers)
            after_layer(layer)
        return results

    def _compute(self, chunk: Chunk) -> ChunkResult:
        sequence, block_size = chunk.sequence, self._settings.block_size
        token_ids, start = sequence.token_ids, sequence.num_computed
        end = start + chunk.num_tokens
        state = sequence.runner_data
        is_first = type(state) is not _SequenceState or state.num_preemptions != sequence.num_preemptions
        if is_first:
            state = self._begin(sequence)
        assert type(state) is _SequenceState
        assert self.memory is not None
        chain = state.chain
        chain.extend(token_ids, end)
        first_written = start // block_size
        for index in range(first_written, (end - 1) // block_size + 1):
            self.memory.write(sequence.block_ids[index], chain.digest(index))
        if not chunk.sample and sequence.sampling.prompt_logprobs is None:
            return NOT_SAMPLED
        return self._result(chunk, state, 0 if is_first else first_written)

    def _begin(self, sequence: TokenSequence) -> _SequenceState:
        """Checks all KV that it finds for this request, before a byte of it is overwritten."""
        assert self.memory is not None
        block_size, num_computed = self._settings.block_size, sequence.num_computed
        prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        directives = read_directives(prompt_ids) if self._settings.sim_directives else Directives()
        if directives.is_crash:
            _log.error("crash_directive", engine_request_id=sequence.engine_request_id)
            os._exit(CRASH_EXIT_CODE)
        state = _SequenceState(sequence, Chain(self._key, block_size), directives)
        sequence.runner_data = state
        state.chain.extend(sequence.token_ids, num_computed)
        num_full = num_computed // block_size
        for index in range(num_full):
            self._check(sequence, state, index)
        if num_computed % block_size:
            shorter = state.chain.digest(num_full)
            state.chain.extend(sequence.token_ids, num_computed + 1)
            if not self.memory.is_right(sequence.block_ids[num_full], shorter):
                self._check(sequence, state, num_full)
        return state

    def _check(self, sequence: TokenSequence, state: _SequenceState, index: int) -> None:
        assert self.memory is not None
        block_id = sequence.block_ids[index]
        if not self.memory.is_right(block_id, state.chain.digest(index)):
            state.damage = zlib.crc32(self.memory.read(block_id)) | 1
            _log.error(
                "kv_bytes_wrong",
                engine_request_id=sequence.engine_request_id,
                block_index=index,
                block_id=block_id,
                num_blocks=len(sequence.block_ids),
            )

    def _check_in_turn(self, batch: list[Chunk]) -> None:
        block_size = self._settings.block_size
        for _ in range(min(self._settings.sim_verify_blocks, len(batch))):
            self._turn += 1
            sequence = batch[self._turn % len(batch)].sequence
            state, num_full = sequence.runner_data, sequence.num_computed // block_size
            if type(state) is _SequenceState and num_full:
                state.next_check = (state.next_check + 1) % num_full
                self._check(sequence, state, state.next_check)

    def _result(self, chunk: Chunk, state: _SequenceState, num_to_check: int) -> ChunkResult:
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        start, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        token_id = logprob = None
        if chunk.sample:
            num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
            token_id = state.echo.token(num_generated, state.damage)
            if token_id == EOS or num_generated + 1 >= sampling.max_tokens:
                for index in range(num_to_check):
                    self._check(sequence, state, index)
                token_id = state.echo.token(num_generated, state.damage)
            if sampling.logprobs is not None:
                logprob = fake_logprob(token_id, end, sampling.logprobs)
        num_top = sampling.prompt_logprobs
        positions = range(start + 1, min(end + 1, sequence.num_prompt_tokens)) if num_top is not None else ()
        return ChunkResult(
            token_id, logprob, tuple(fake_logprob(sequence.token_ids[q], q, num_top or 0) for q in positions)
        )

    def _device_ms(self, batch: list[Chunk]) -> float:
        """How long the device would take for this step."""
        s, total_ms, num_decodes, context = self._settings, 0.0, 0, 0
        for chunk in batch:
            start, num_tokens = chunk.sequence.num_computed, chunk.num_tokens
            state = chunk.sequence.runner_data
            if type(state) is _SequenceState:
                total_ms += state.directives.slow_ms
            if num_tokens == 1:
                num_decodes += 1
                context += start
                continue
            squares = (start + num_tokens) ** 2 - start**2
            total_ms += s.sim_prefill_ms + s.sim_prefill_token_ms * num_tokens + s.sim_prefill_square_ms * squares
        if num_decodes:
            total_ms += s.sim_decode_ms + s.sim_decode_sequence_ms * num_decodes + s.sim_decode_context_ms * context
        return total_ms


def _sleep_until(time_s: float) -> None:
    remaining_s = time_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)
