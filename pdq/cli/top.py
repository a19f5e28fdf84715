"""`pdq top`: `pdq status` that stays on the screen, with KV pools as bars and tokens per second. q or Ctrl-C leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from broker.errors import QueueUnavailable
from pdq.cli.rates import Rates
from pdq.cli.snapshot import snapshots
from pdq.cli.store import Store, StoreSettings, run_with_store
from pdq.cli.tables import snapshot_lines
from pdq.runtime.settings import load


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSettings:
    refresh_s: float = field(default=1.0, metadata={"help": "pace of the frames"})
    once: bool = field(default=False, metadata={"help": "print one frame, after one such pace, and end"})
    max_requests: int = field(default=10, metadata={"help": "most waiting requests to show per model"})
    store: StoreSettings = field(default_factory=StoreSettings)

    def __post_init__(self) -> None:
        if self.refresh_s <= 0:
            raise ValueError("refresh_s: above 0")


def main(argv: Sequence[str]) -> int:
    loaded = load(TopSettings, argv, prog="pdq top", description="Live view of queue and workers; q leaves.")
    settings = loaded.settings

    async def top(store: Store) -> int:
        console = Console(highlight=False)
        frames = _Frames(store, settings.max_requests)
        if settings.once or not console.is_terminal:
            await frames.next()
            await asyncio.sleep(settings.refresh_s)  # a rate needs two looks
            console.print(await frames.next())
            return 0
        left = asyncio.Event()
        with _leave_at_q(left), Live(console=console, screen=True, auto_refresh=False) as live:
            while not left.is_set():
                live.update(await frames.next(), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(settings.refresh_s):
                        await left.wait()
        return 0

    code = run_with_store("pdq top", loaded, settings.store, top)
    return 0 if code == 130 else code


class _Frames:
    def __init__(self, store: Store, max_requests: int) -> None:
        self._store = store
        self._max_requests = max_requests
        self._rates = Rates()
        self._last = Group()

    async def next(self) -> Group:
        """While Redis gives no answer: the last frame, with a line that says so."""
        try:
            found = await snapshots(self._store, self._max_requests)
        except QueueUnavailable as error:
            return Group(f"[red]{escape(str(error))}[/]", self._last)
        rates = self._rates.observe([worker for one in found for worker in one.workers], time.monotonic())
        head = f"[dim]{time.strftime('%H:%M:%S')}  {self._store.where}  q leaves[/]"
        lines = [line for one in found for line in snapshot_lines(one, rates)]
        self._last = Group(head, *(lines or ["no model is served"]))
        return self._last


@contextlib.contextmanager
def _leave_at_q(left: asyncio.Event) -> Iterator[None]:
    """Single key presses, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def on_key() -> None:
        pressed = os.read(keyboard, 64)
        if not pressed or b"q" in pressed.lower():
            left.set()

    try:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, on_key)
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
