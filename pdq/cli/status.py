"""`pdq status`: workers, queue and requests in flight of each served model, read from Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from pdq.cli.snapshot import snapshots
from pdq.cli.store import Store, StoreSettings, run_with_store
from pdq.cli.tables import snapshot_lines
from pdq.runtime.settings import load


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    max_requests: int = field(default=20, metadata={"help": "most requests to show per model"})
    store: StoreSettings = field(default_factory=StoreSettings)


def main(argv: Sequence[str]) -> int:
    loaded = load(StatusSettings, argv, prog="pdq status", description="Workers, queue and requests in flight.")
    settings = loaded.settings

    async def show(store: Store) -> int:
        console = Console(highlight=False)
        found = await snapshots(store, settings.max_requests)
        if not found:
            console.print(f"no model is served on {store.where}")
        for snapshot in found:
            console.print(*snapshot_lines(snapshot), sep="\n")
        return 0

    return run_with_store("pdq status", loaded, settings.store, show)
