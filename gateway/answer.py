"""One HTTP answer in the making: the exchanges behind it, their choices, and what is said about them at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog

from gateway.choice import Choice
from gateway.commands import Fail, Finish
from gateway.errors import GatewayError
from gateway.exchange import Bell, Exchange
from gateway.hub import Hub
from gateway.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.metrics import GatewayMetrics
from gateway.parsing import Ask
from gateway.tokenizer import TextTokenizer
from pdq.wire.types import TokenLogprob

log = structlog.get_logger(__name__)
_ENDPOINTS: Final = {"chat": "chat", "text": "completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One prompt with its choice."""

    index: int
    exchange: Exchange
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What names the answer."""

    request_id: str
    """Ours: in every log line, key and message."""
    answer_id: str
    """The same with OpenAI's prefix."""
    created: int
    model: str
    client_request_id: str
    has_trace: bool


class Answer:
    """State shared by the two ways to write it: `json_answer.py` and `event_stream.py`."""

    def __init__(
        self,
        ask: Ask,
        label: Label,
        parts: list[Part],
        *,
        bell: Bell,
        hub: Hub,
        tokenizer: TextTokenizer,
        metrics: GatewayMetrics,
        received_at: float,
    ) -> None:
        self.ask = ask
        self.label = label
        self.parts = parts
        self.bell = bell
        self._hub = hub
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._received_at = received_at
        self.is_client_gone = False
        self._is_told = False

    @property
    def failure(self) -> GatewayError | None:
        """The first prompt that failed ends the whole answer."""
        for part in self.parts:
            if isinstance(part.exchange.end, Fail):
                return GatewayError(part.exchange.end.code, part.exchange.end.message)
        return None

    @property
    def is_finished(self) -> bool:
        return all(part.choice.finish_reason is not None for part in self.parts)

    def read(self, part: Part) -> Iterator[str]:
        """Feeds what came to the choice; its new texts, one per engine step (empty ones left out).

        Raises GatewayError. Tells the hub when a stop string ends it.
        """
        choice, exchange = part.choice, part.exchange
        for emit in exchange.take():
            text = choice.feed(emit)
            if text:
                yield text
        if choice.is_stopped and exchange.end is None:
            self._hub.stop_string(exchange)

    def close(self, part: Part) -> str:
        """The last text of a choice whose exchange has finished."""
        end = part.exchange.end
        assert isinstance(end, Finish)
        return part.choice.finish(end.reason)

    def logprobs(self, part: Part) -> dict[str, Any] | None:
        """Of the tokens since the last call; None when nobody asked."""
        if not self.ask.logprobs:
            return None
        entries = part.choice.take_logprobs()
        if self.ask.kind == "chat":
            return chat_logprobs(self._tokenizer, [entry for _, entry in entries if entry is not None])
        document = completion_logprobs(self._tokenizer, entries, part.choice.num_logprob_chars)
        part.choice.num_logprob_chars += sum(map(len, document["tokens"]))
        return document

    def echo_text(self, part: Part) -> str:
        prompt = part.exchange.prompt
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self.ask.skip_special_tokens)

    def echo_entries(self, part: Part) -> list[tuple[int, TokenLogprob | None]]:
        """Of the prompt's tokens. Raises GatewayError when the prefill worker did not send them."""
        positions = self._positions(part)
        return list(zip(part.exchange.prompt.token_ids, positions, strict=True))

    def echo_logprobs(self, entries: list[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        return completion_logprobs(self._tokenizer, entries, 0)

    def prompt_logprobs(self, part: Part) -> list[dict[str, dict[str, Any]] | None]:
        return prompt_logprobs(self._tokenizer, self._positions(part))

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(part.exchange.prompt.token_ids) for part in self.parts)
        completion = sum(part.choice.num_tokens for part in self.parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(part.exchange.cached_tokens for part in self.parts)},
        }

    def trace(self) -> dict[str, Any]:
        """`pdq`: how the (first) prompt went through the pipeline."""
        exchange = self.parts[0].exchange
        admit, end = exchange.admit, exchange.end
        stats = end.stats if isinstance(end, Finish) else None
        transfer = stats.transfer if stats is not None else None
        prefill_s = stats.prefill_s if stats is not None and stats.prefill_s is not None else admit and admit.prefill_s
        first = exchange.first_token_at
        return {
            "mode": exchange.route and exchange.route.way.value,
            "mode_reason": exchange.route and exchange.route.reason,
            "prefill_worker": admit and (admit.prefill_worker or None),
            "decode_worker": admit and admit.worker,
            "queue_wait_ms": admit and round(admit.queue_wait_s * 1000, 3),
            "prefill_ms": prefill_s and round(prefill_s * 1000, 3),
            "ttft_ms": None if first is None else round((first - exchange.received_at) * 1000, 3),
            "kv_bytes": transfer and transfer.num_bytes,
            "kv_descriptors": transfer and transfer.num_descriptors,
            "kv_hidden_ms": transfer and round(transfer.hidden_seconds * 1000, 3),
            "kv_ms": transfer and round(transfer.seconds * 1000, 3),
            "gen": admit and admit.pair.gen,
            "attempt": admit and admit.pair.attempt,
        }

    def client_gone(self) -> None:
        self.is_client_gone = True
        self.cancel()

    def cancel(self) -> None:
        """Stops what still runs; nothing happens for what has ended."""
        for part in self.parts:
            self._hub.client_gone(part.exchange)
        self.bell.ring()

    def tell(self, outcome: str, code: str = "") -> None:
        """Counts and logs the request, once."""
        if self._is_told:
            return
        self._is_told = True
        duration_s = asyncio.get_running_loop().time() - self._received_at
        self._metrics.count(_ENDPOINTS[self.ask.kind], outcome, code)
        self._metrics.duration.observe(duration_s)
        log.info(
            "request_finished",
            request_id=self.label.request_id,
            client_request_id=self.label.client_request_id,
            outcome=outcome,
            code=code or self.parts[0].choice.finish_reason,
            num_prompt_tokens=sum(len(part.exchange.prompt.token_ids) for part in self.parts),
            num_generated_tokens=sum(part.choice.num_tokens for part in self.parts),
            duration_s=round(duration_s, 4),
        )

    def _positions(self, part: Part) -> tuple[TokenLogprob | None, ...]:
        positions = part.exchange.prompt_logprobs
        if positions is None or len(positions) != len(part.exchange.prompt.token_ids):
            raise GatewayError("prompt_logprobs_missing", "the prefill worker sent no log probabilities of the prompt")
        return positions
