"""Requests, and cores that are stepped by hand: what the engine tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connector.settings import ConnectorSettings
from connector.transport import Transport
from engine.base import EngineOutput, EngineRequest, LoadKv, PrefillOnly, PushKv, ReceiveKv, StepOutputs
from engine.embedded.block_hash import extend_hashes
from engine.embedded.boot import boot
from engine.embedded.messages import Abort, Identity, Launch, Release
from engine.embedded.request import State
from engine.embedded.settings import EngineSettings
from engine.embedded.sim_echo import BOS
from pdq.wire.types import KvTicket, Pair, SamplingParams, TokenLogprob, pack_ids, unpack_ids

PATIENT = ConnectorSettings(
    kv_answer_s=0.2, kv_answer_tries=300, kv_wait_s=90.0, kv_lease_s=90.0, kv_hold_s=90.0, kv_release_delay_s=0.0
)
"""A busy machine counts for nobody's death."""
SMALL = EngineSettings(num_blocks=64, block_size=4, sim_kv_bytes_per_token=64, sim_layers=2)


def request(
    name: str,
    prompt: str | list[int],
    *,
    generated: list[int] | None = None,
    kv: PrefillOnly | LoadKv | PushKv | ReceiveKv | None = None,
    pair: Pair = Pair(gen=1, attempt=1),  # noqa: B008 - frozen
    max_tokens: int = 5000,
    **sampling: Any,
) -> EngineRequest:
    """`name` is the request id; the engine's id is made of it and the pair."""
    prompt_ids = [BOS, *prompt.encode()] if isinstance(prompt, str) else prompt
    return EngineRequest(
        engine_request_id=f"{name}:{pair.gen}:{pair.attempt}",
        request_id=name,
        pair=pair,
        prompt_ids=pack_ids(prompt_ids),
        generated_ids=pack_ids(generated or []),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        kv=kv,
    )


def load(ticket: KvTicket) -> LoadKv:
    return LoadKv(ticket=ticket)


def after_the_check(first: Transport, transport: Transport) -> Callable[[ConnectorSettings], Transport]:
    """`first` is the start-up check's."""
    made = iter([first, transport])
    return lambda _: next(made)


@dataclass(slots=True)
class Answer:
    """All that came for one engine request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    end: EngineOutput | None = None
    num_released: int = 0

    @property
    def text(self) -> str:
        return bytes(token for token in self.ids if token < 256).decode(errors="replace")

    def take(self, output: EngineOutput) -> None:
        assert self.end is None, "nothing comes after the end"
        self.ids += unpack_ids(output.token_ids)
        self.logprobs += output.logprobs or ()
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish or output.error:
            self.end = output


class Answers(dict[str, Answer]):
    """By request id (the name)."""

    def take(self, step: StepOutputs) -> None:
        for output in step.outputs:
            self.of(output.engine_request_id).take(output)
        for engine_request_id in step.released:
            self.of(engine_request_id).num_released += 1

    def of(self, engine_request_id: str) -> Answer:
        return self.setdefault(engine_request_id.split(":")[0], Answer())

    def __missing__(self, name: str) -> Answer:
        return self.setdefault(name, Answer())


class Bench:
    """One core in this process, stepped by the test."""

    def __init__(
        self,
        settings: EngineSettings = SMALL,
        *,
        connector: ConnectorSettings | None = None,
        transport: Callable[[ConnectorSettings], Transport] | None = None,
        role: str = "both",
        on_progress: Callable[[], None] = lambda: None,
        mode: str = "pull",
    ) -> None:
        launch = Launch(
            settings=settings,
            connector=connector,
            identity=Identity(engine_id=f"engine-{role}", epoch=f"epoch-{role}", role=role, mode=mode),
        )
        self.core, self.info = boot(launch, report=lambda text: None, on_progress=on_progress, new_transport=transport)
        self.answers = Answers()
        self.num_free_at_start = self.core.pool.num_free

    @property
    def runner(self) -> Any:
        """The sim runner, for tests that look at or damage its memory."""
        return self.core.runner

    def first_hashes(self, text: str) -> list[bytes]:
        """Names of the full blocks of this prompt."""
        token_ids, block_size = [BOS, *text.encode()], self.info.block_size
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, len(token_ids), block_size)
        return hashes

    def submit(self, *requests: EngineRequest) -> None:
        for item in requests:
            self.core.handle(item)

    def abort(self, name: str, pair: str = "1:1") -> None:
        self.core.handle(Abort(engine_request_id=f"{name}:{pair}"))

    def release(self, name: str, pair: str = "1:1") -> None:
        self.core.handle(Release(engine_request_id=f"{name}:{pair}"))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            step = self.core.step()
            self.core.pool.check_integrity()
            self.answers.take(step)

    def until_begun(self, name: str) -> None:
        """Steps until it is more than queued. A push that is cancelled before that waits for another reader."""
        while self.core.scheduler.state_of(f"{name}:1:1") is State.WAITING:
            self.step()

    def run(self, max_steps: int = 5000) -> Answers:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.is_busy:
                return self.answers
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.core.stats()}")
