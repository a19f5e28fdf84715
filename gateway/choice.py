"""One choice of an answer as it grows: text with stop strings applied, token counts, log probabilities. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.commands import Emit
from gateway.detokenise import TextDecoder
from gateway.errors import GatewayError
from gateway.stops import StopStrings
from pdq.wire.types import TokenLogprob


class Choice:
    """`feed` tokens, `finish` once; take text and logprobs in between or at the end."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stops: tuple[str, ...],
        include_stop: bool,
        min_tokens: int,
        wants_logprobs: bool,
        is_muted: bool = False,
    ) -> None:
        """`is_muted`: tokens are thrown away (max_tokens 0 with echo)."""
        self._decoder = decoder
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._is_muted = is_muted
        self._entries: list[tuple[int, TokenLogprob | None]] = []
        self.num_tokens = 0
        self.num_logprob_chars = 0
        """Where the next reported token begins in the text, as the token texts add up."""
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.token_ids: list[int] = []
        self._num_ids_taken = 0

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: nothing more is wanted."""
        return self._stops is not None and self._stops.matched is not None

    def feed(self, emit: Emit) -> str:
        """The text that can be sent now. Raises GatewayError when asked-for logprobs are missing."""
        if self._is_muted or self.is_stopped:
            return ""
        if self._wants_logprobs:
            if emit.logprobs is None or len(emit.logprobs) != len(emit.token_ids):
                raise GatewayError("engine_error", "the decode worker sent no log probabilities")
            self._entries += zip(emit.token_ids, emit.logprobs, strict=True)
        self.token_ids += emit.token_ids
        token_ids = emit.token_ids
        if emit.stop_token_id is not None:
            self.stop_reason = emit.stop_token_id
            if not self._include_stop:
                token_ids = token_ids[:-1]  # EOS or a stop token ends the text and is no part of it
        text = ""
        if token_ids:
            text = self._text(token_ids) if self._stops is not None else self._decoder.feed(token_ids)
        self.num_tokens += len(emit.token_ids)
        return text

    def finish(self, reason: str) -> str:
        """The end. Returns what was held back."""
        self.finish_reason = reason
        if self._is_muted:
            return ""
        if self._stops is None:
            text = self._decoder.flush()
        else:
            text = "" if self.is_stopped else self._stops.feed(self._decoder.flush()) + self._stops.flush()
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return text

    @property
    def has_logprobs(self) -> bool:
        return bool(self._entries)

    def take_token_ids(self) -> list[int]:
        """Ids since the last call."""
        taken, self._num_ids_taken = self._num_ids_taken, len(self.token_ids)
        return self.token_ids[taken:]

    def take_logprobs(self) -> Sequence[tuple[int, TokenLogprob | None]]:
        """Entries since the last call."""
        entries, self._entries = self._entries, []
        return entries

    def _text(self, token_ids: list[int]) -> str:
        assert self._stops is not None
        below = max(0, self._min_tokens - self.num_tokens)
        text = ""
        if below:
            text = self._stops.skip(self._decoder.feed(token_ids[:below])) if token_ids[:below] else ""
            token_ids = token_ids[below:]
        return text + (self._stops.feed(self._decoder.feed(token_ids)) if token_ids else "")
