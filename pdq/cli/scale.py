"""`pdq scale prefill=3 decode=2`: asks a running `pdq up` for so many worker processes; waits until they are there.

Fewer: the newest drain, finish what they have and end. A role that is not named stays as it is. Without numbers it
shows what each `pdq up` runs. Exit code 0 reached (or asked for, with --no-wait), 1 not reached, 2 nobody to ask.
A row that is missing while it waits is no proof of an end: on a busy machine, or after Redis hung, it is late.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.redis_scale import RedisScale, ScaleRow, Wish
from broker.registry_settings import RegistrySettings
from pdq.cli.run_folder import row_name
from pdq.cli.store import CommandFailed, Store, StoreSettings, run_with_store
from pdq.runtime.settings import load

_NUMBER: Final = re.compile(r"(\w+)=(\w*)")
_ROLES: Final = ("prefill", "decode")
_FIRST_ROW_S: Final = 3.0
"""A `pdq up` that has just started is heard of within this time."""
_SILENT_S: Final = 2 * RegistrySettings().registry_ttl_s
"""One whose row has been missing for so long is gone."""
_PACE_S: Final = 0.2
_TRIES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    host: str | None = field(default=None, metadata={"help": "which `pdq up`, when several run: start of its name"})
    wait: bool = field(default=True, metadata={"help": "wait until the numbers are reached"})
    wait_limit_s: float = field(default=120.0, metadata={"help": "longest such wait"})
    store: StoreSettings = field(default_factory=StoreSettings)


def main(argv: Sequence[str]) -> int:
    words = [word for word in argv if _NUMBER.fullmatch(word)]
    loaded = load(
        ScaleSettings,
        [word for word in argv if word not in words],
        prog="pdq scale",
        description="Asks a running `pdq up` for other numbers of workers: pdq scale prefill=3 decode=2.",
    )
    settings = loaded.settings

    async def scale(store: Store) -> int:
        asked = _numbers(words)
        table = RedisScale(store.calls, await store.model(), RegistrySettings())
        if not asked:
            return _show(await table.rows())
        before, wish = await _ask(table, await _row(table, store, settings.host), asked)
        print(f"{before.name}: asked for {wish} (was {before.wish})", flush=True)
        return await _until_reached(table, before, wish, settings.wait_limit_s) if settings.wait else 0

    return run_with_store("pdq scale", loaded, settings.store, scale)


def _numbers(words: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        if role not in _ROLES or not number.isdigit():
            raise CommandFailed(f"{word!r}: give prefill=NUMBER, decode=NUMBER or both", 2)
        found[role] = int(number)
    return found


def _show(rows: Sequence[ScaleRow]) -> int:
    for row in rows:
        print(f"{row.name}: {row.wish}; {_progress(row, row.wish)}")
    if not rows:
        print("no `pdq up` runs here; workers that were started by hand are ended with `pdq drain WORKER_ID`")
    return 0


async def _row(table: RedisScale, store: Store, host: str | None) -> ScaleRow:
    """The `pdq up` that is meant. Raises CommandFailed when that is not clear, or there is none."""
    give_up_at = time.monotonic() + _FIRST_ROW_S
    while not (rows := await table.rows()) and time.monotonic() < give_up_at:  # noqa: ASYNC110 - another process's key
        await asyncio.sleep(_PACE_S)
    if not rows:
        raise CommandFailed("no `pdq up` runs here; start workers by hand, end them with `pdq drain WORKER_ID`", 2)
    start = host if host is not None else row_name(store.up_path) if store.up_path else ""
    exact = [row for row in rows if row.name == start]
    chosen = exact or [row for row in rows if row.name.startswith(start)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(row.name for row in rows)
    raise CommandFailed(
        f"{'several' if chosen else 'no such'} `pdq up`; give --host with the start of one of {names}", 2
    )


async def _ask(table: RedisScale, row: ScaleRow, asked: Mapping[str, int]) -> tuple[ScaleRow, Wish]:
    """The row as it was then, and what was asked of it."""
    for _ in range(_TRIES):
        try:
            wish = dataclasses.replace(row.wish, **asked)
        except ValueError as error:
            raise CommandFailed(str(error), 2) from error
        in_force = await table.ask(row, wish)
        if in_force is None:
            raise CommandFailed(f"{row.name} is gone", 2)
        if in_force == wish:
            return row, wish
        row = dataclasses.replace(row, wish=in_force)  # somebody was faster: his number of the other role stays
    raise CommandFailed("others ask for other numbers all the time")


async def _until_reached(table: RedisScale, before: ScaleRow, wish: Wish, limit_s: float) -> int:
    """`before`: the row that was asked."""
    started_at = heard_at = time.monotonic()
    said, is_away = "", False
    while True:
        row = next((row for row in await table.rows() if row.name == before.name), None)
        now = time.monotonic()
        if row is None:
            is_away, progress = True, f"no word of {before.name}"
        else:
            if is_away and row.wish == before.wish:  # it has brought the one that it had read: ours is lost
                row = dataclasses.replace(row, wish=await table.ask(row, wish) or row.wish)
            if row.wish != wish:
                raise CommandFailed(row.state.problem or f"somebody has asked for {row.wish} meanwhile")
            heard_at, is_away, progress = now, False, _progress(row, wish)
        if progress != said:
            print(f"{now - started_at:6.1f} s  {progress}", flush=True)
            said = progress
        if row is not None and _is_reached(row, wish):
            return 0
        if now - heard_at > _SILENT_S:
            raise CommandFailed(f"{before.name} is gone")
        if now - started_at > limit_s:
            raise CommandFailed(f"not reached within {limit_s:g} s; it goes on trying")
        await asyncio.sleep(_PACE_S)


def _is_reached(row: ScaleRow, wish: Wish) -> bool:
    state = row.state
    is_settled = state.wish == str(wish) and state.starting == state.draining == 0
    return is_settled and (state.prefill, state.decode) == (wish.prefill, wish.decode)


def _progress(row: ScaleRow, wish: Wish) -> str:
    state = row.state
    more = "".join(f", {count} {what}" for what in ("starting", "draining") if (count := getattr(state, what)))
    return f"prefill {state.prefill} of {wish.prefill} ready, decode {state.decode} of {wish.decode} ready{more}"
