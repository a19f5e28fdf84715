"""`pdq dead list | show ID | drop ID`: the jobs that the queue gave up, and why. Never shows a prompt.

ID: a request id, or the entry id of one letter; `drop all` drops every one. Exit code 2: no such letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from broker.redis_dead import DeadLetter, DeadLetters, PayloadCounts
from pdq.cli.store import CommandFailed, Store, StoreSettings, run_with_store
from pdq.runtime.settings import load

_ACTIONS: Final = ("list", "show", "drop")
_ALL: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSettings:
    max_letters: int = field(default=50, metadata={"help": "most letters to list, the newest first"})
    store: StoreSettings = field(default_factory=StoreSettings)


def main(argv: Sequence[str]) -> int:
    num_words = next((n for n, word in enumerate(argv) if word.startswith("-")), len(argv))
    words = list(argv[:num_words]) or ["list"]
    loaded = load(
        DeadSettings,
        argv[num_words:],
        prog="pdq dead",
        description="Jobs that the queue gave up: pdq dead list | show ID | drop ID | drop all.",
    )
    settings = loaded.settings

    async def act(store: Store) -> int:
        action, *ids = words
        if action not in _ACTIONS or len(ids) != (action != "list"):
            raise CommandFailed("give: list, show ID, drop ID or drop all", 2)
        letters = DeadLetters(store.calls, await store.model())
        if action == "list":
            _print_list(await letters.newest(settings.max_letters))
            return 0
        found = [one for one in await letters.newest(_ALL) if _is_meant(one, ids[0], action)]
        if not found and (action, ids[0]) != ("drop", "all"):
            raise CommandFailed(f"no dead letter {ids[0]!r}; see `pdq dead list`", 2)
        if action == "drop":
            print(f"dropped {sum([await letters.drop(letter) for letter in found])}")
        else:
            for letter in found:
                _print_one(letter, await letters.payload(letter))
        return 0

    return run_with_store("pdq dead", loaded, settings.store, act)


def _is_meant(letter: DeadLetter, name: str, action: str) -> bool:
    return name in (letter.request_id, letter.entry_id) or (name == "all" and action == "drop")


def _print_list(letters: Sequence[DeadLetter]) -> None:
    console = Console(highlight=False)
    if not letters:
        console.print("no dead letters")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)  # to be copied
    for name in ("reason", "error"):
        table.add_column(name, overflow="fold")
    for name in ("gen.attempt", "tokens", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for letter in letters:
        known = letter.fields
        pair = f"{letter.gen}.{known.get('attempts', '0')}"
        cells = (known.get("reason", ""), known.get("error", ""), pair, known.get("tokens", "-"), _age(letter.age_s))
        table.add_row(letter.request_id, *cells)
    console.print(table)


def _print_one(letter: DeadLetter, payload: PayloadCounts | str) -> None:
    at = datetime.fromtimestamp(int(letter.entry_id.partition("-")[0]) / 1000).astimezone()
    told = payload
    if isinstance(payload, PayloadCounts):
        told = (
            f"{payload.num_prompt_tokens} prompt tokens, {payload.num_generated_tokens} generated, "
            f"max_tokens {payload.max_tokens}, mode {payload.mode}"
        )
    rows = {"letter": letter.entry_id, "given up": f"{at:%Y-%m-%d %H:%M:%S %z} ({_age(letter.age_s)} ago)"}
    for name, value in {**rows, **letter.fields, "payload": told}.items():
        print(f"{name:<10}{value}")


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
