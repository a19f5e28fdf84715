"""Where the IO thread leaves what ended, and the engine's thread takes it: each id exactly once."""

from __future__ import annotations

import threading

from connector.step import TransferResults
from pdq.wire.types import TransferStats


class Results:
    """Safe to share between two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: dict[str, str] = {}
        self._stats: dict[str, TransferStats] = {}
        self._counts: dict[str, int] = {}
        self._fatal: str | None = None
        self._news = False

    def sent(self, engine_request_id: str) -> None:
        """Not news by itself, see `announce_sent`."""
        with self._lock:
            self._sent.add(engine_request_id)

    def announce_sent(self) -> None:
        """Makes what `sent` brought news, unless it was taken already: a wake-up for several ids, or for none."""
        with self._lock:
            self._news = self._news or bool(self._sent)

    def loaded(self, engine_request_id: str, stats: TransferStats) -> None:
        with self._lock:
            self._received.add(engine_request_id)
            self._stats[engine_request_id] = stats
            self._news = True

    def not_loaded(self, engine_request_id: str, reason: str | None) -> None:
        """Reason None: cancelled by the engine itself."""
        with self._lock:
            self._received.add(engine_request_id)
            if reason is not None:
                self._failed[engine_request_id] = reason
            self._news = True

    def count(self, name: str, number: int = 1) -> None:
        """No news by itself."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number

    def fail(self, reason: str) -> None:
        """Some blocks can't be given back safely any more."""
        with self._lock:
            self._fatal = reason
            self._news = True

    def has_news(self) -> bool:
        """True once per change."""
        with self._lock:
            news, self._news = self._news, False
            return news

    def take(self) -> TransferResults:
        with self._lock:
            results = TransferResults(
                finished_sending=frozenset(self._sent),
                finished_recving=frozenset(self._received),
                failed_recving=self._failed,
                stats=self._stats,
                counts=self._counts,
                fatal=self._fatal,
            )
            self._sent, self._received, self._failed, self._stats, self._counts = set(), set(), {}, {}, {}
            return results
