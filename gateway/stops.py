"""Stop strings across token boundaries: text that may still become a stop string is held back. Pure."""

from __future__ import annotations


class StopStrings:
    """Feed it text as it comes; it returns what is safe to send.

    The text ends before the earliest match (or after it with `include`); of two that begin at the same place the longer
    one wins only when it is complete at the same moment, so the result depends on the text, not on how it was cut.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be sent now. After a match (`matched` is set) everything else is dropped."""
        if self.matched is not None:
            return ""
        self._held += text
        hit = self._first_match()
        if hit is not None:
            start, self.matched = hit
            end = start + len(self.matched) if self._include else start
            sent, self._held = self._held[:end], ""
            return sent
        keep = self._possible_start()
        sent, self._held = self._held[:keep], self._held[keep:]
        return sent

    def skip(self, text: str) -> str:
        """Text in which nothing may match (below `min_tokens`): released at once, with what was held."""
        sent, self._held = self._held + text, ""
        return sent

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string."""
        sent, self._held = self._held, ""
        return sent

    def _first_match(self) -> tuple[int, str] | None:
        """The match that is complete first, as if the text had come character by character."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[1], best[2])

    def _possible_start(self) -> int:
        held = self._held
        for start in range(max(0, len(held) - self._longest + 1), len(held)):
            tail = held[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(held)
