"""A scheduler without runner: the test says what is sampled and when transfers end."""

from __future__ import annotations

from connector.step import TransferResults
from engine.base import LoadKv, PrefillOnly
from engine.embedded.block_pool import BlockPool
from engine.embedded.intake import Limits
from engine.embedded.request import State
from engine.embedded.runner import NOT_SAMPLED, ChunkResult
from engine.embedded.scheduler import Scheduler
from engine.embedded.settings import EngineSettings
from tests.engine.drive import Answers, request
from tests.engine.scripted_half import BLOCK_SIZE, ScriptedHalf, ticket

EOS = 9
SETTINGS = EngineSettings(
    num_blocks=16, block_size=BLOCK_SIZE, max_num_batched_tokens=16, max_num_seqs=8, watermark_blocks=1
)


class Rig:
    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self.half = ScriptedHalf()
        self.pool = BlockPool(settings.num_blocks)
        self.scheduler = Scheduler(
            settings,
            self.pool,
            self.half,
            limits=Limits(max_model_len=settings.num_blocks * BLOCK_SIZE, vocab_size=1000),
            eos_token_ids=frozenset({EOS}),
        )
        self.answers = Answers()

    def local(self, name: str, num_tokens: int, **options) -> None:
        self.scheduler.add(request(name, list(range(100, 100 + num_tokens)), **options))

    def prefill(self, name: str, num_tokens: int) -> None:
        self.local(name, num_tokens, kv=PrefillOnly())

    def load(self, name: str, num_tokens: int, **options) -> None:
        self.local(name, num_tokens, kv=LoadKv(ticket=ticket(name, num_tokens)), **options)

    def step(self, token: int = 5, results: TransferResults | None = None) -> int:
        """One step that samples `token` everywhere; returns how many tokens it computed."""
        chunks = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in chunks) <= 16
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.num_computed + chunk.num_tokens <= len(sequence.block_ids) * BLOCK_SIZE
        self.scheduler.update(chunks, [ChunkResult(token) if chunk.sample else NOT_SAMPLED for chunk in chunks])
        if results is not None:
            self.scheduler.on_transfers(results)
        self._take()
        return sum(chunk.num_tokens for chunk in chunks)

    def transfers(self, results: TransferResults) -> None:
        self.scheduler.on_transfers(results)
        self._take()

    def abort(self, name: str) -> None:
        self.scheduler.abort(f"{name}:1:1")
        self._take()

    def state(self, name: str) -> State | None:
        return self.scheduler.state_of(f"{name}:1:1")

    def _take(self) -> None:
        outputs, released = self.scheduler.take_news()
        for output in outputs:
            self.answers.of(output.engine_request_id).take(output)
        for engine_request_id in released:
            self.answers.of(engine_request_id).num_released += 1
        self.pool.check_integrity()
