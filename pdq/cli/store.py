"""How the operators' commands reach Redis: by URL, or through the run folder of a `pdq up` on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from broker.errors import QueueUnavailable
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_view import served_models
from pdq.cli.run_folder import read_up
from pdq.runtime import logs
from pdq.runtime.settings import Loaded

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    served_model_name: str | None = field(default=None, metadata={"help": "one model; none: the one or all served"})
    run_dir: Path = field(
        default=Path(".pdq"), metadata={"help": "without --redis: the folder of the `pdq up` to look at"}
    )
    redis: RedisSettings = field(default_factory=RedisSettings)


class CommandFailed(Exception):
    """Told to the person as it is. `code`: 1 it did not work out, 2 it can't."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Store:
    """An open connection, and where it leads. `up_path`: folder of the `pdq up` through which it was found."""

    def __init__(self, settings: StoreSettings, redis: RedisSettings, up_path: Path | None) -> None:
        self.settings = settings
        self.where = redis.redis.rpartition("@")[2]
        self.up_path = up_path
        self.calls = RedisCalls(redis, client_name="pdq-cli")

    async def models(self) -> tuple[str, ...]:
        """Those to look at. Raises QueueUnavailable."""
        name = self.settings.served_model_name
        return (name,) if name else await served_models(self.calls)

    async def model(self) -> str:
        """The one to act on. Raises CommandFailed when that is not clear, and QueueUnavailable."""
        names = await self.models()
        if len(names) > 1 and self.up_path is not None:
            names = tuple(name for name in names if name == read_up(self.up_path).get("model")) or names
        if len(names) == 1:
            return names[0]
        if not names:
            raise CommandFailed(f"no model is served on {self.where}", 2)
        raise CommandFailed(f"several models are served: {', '.join(names)}; give --served-model-name NAME", 2)


def run_with_store(
    prog: str, loaded: Loaded[S], settings: StoreSettings, work: Callable[[Store], Awaitable[int]]
) -> int:
    """The exit code of `work`; of a failure after telling it: 2 without Redis, 130 after Ctrl-C."""
    redis, up_path = settings.redis, None
    if loaded.origins["redis"] == "default":
        up_path = next((path for path in (settings.run_dir, settings.run_dir / "demo") if read_up(path)), None)
        if up_path is not None:
            redis = dataclasses.replace(redis, redis=str(read_up(up_path).get("redis") or redis.redis))
    logs.configure("error", json=False)

    async def connected() -> int:
        store = Store(settings, redis, up_path)
        try:
            await store.calls.start()
            return await work(store)
        finally:
            await store.calls.close()

    try:
        return asyncio.run(connected())
    except CommandFailed as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.code
    except QueueUnavailable as error:
        print(f"{prog}: {error}; give --redis URL, or --run-dir of a running `pdq up`", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
