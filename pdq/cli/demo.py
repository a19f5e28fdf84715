"""`pdq demo`: starts everything, asks one question, shows the answer and what it took, stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from pdq.cli.demo_report import keep_lines, report_table
from pdq.cli.deployment import Deployment
from pdq.cli.deployment_settings import DeploymentSettings
from pdq.cli.gateway_client import ChatFailed, stream_chat
from pdq.cli.up import deployment_of, run, until_drain
from pdq.runtime.errors import StartupError
from pdq.runtime.model import ModelSettings
from pdq.runtime.settings import load
from pdq.runtime.signals import Drain

_READ_TIMEOUT_S: Final = 120.0
_READY_TIMEOUT_S: Final = {"vllm": 900.0}
"""By engine, where it isn't 180."""
_EVERYTHING_TRAVELS: Final = {"PDQ_GATEWAY__LOCAL_MAX_TOKENS": "0"}
"""The demo's prompt is short: by default its decode worker would prefill it itself."""
_TRACE_HEADERS: Final = {"X-Pdq-Trace": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to ask, and what to do afterwards."""

    question: str = field(
        default="What is the capital of France, and what is it known for? Answer in three sentences.",
        metadata={"help": "the chat message that is sent"},
    )
    answer_tokens: int = field(default=128, metadata={"help": "longest answer"})
    keep: bool = field(default=False, metadata={"help": "leave everything up afterwards, until Ctrl-C"})
    ready_timeout_s: float | None = field(
        default=None, metadata={"help": "longest time until everything has started; none: 180 s, vllm 900 s"}
    )
    deployment: DeploymentSettings = field(
        default_factory=lambda: DeploymentSettings(
            prefill=2, decode=1, run_dir=Path(".pdq/demo"), fresh=True, model=ModelSettings(mode="push")
        )
    )


@dataclass(slots=True, kw_only=True)
class Answer:
    """What the client saw."""

    text: str = ""
    first_token_s: float | None = None
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    loaded = load(
        DemoSettings, argv, prog="pdq demo", description="One question through the whole pipeline, and what it took."
    )
    settings = loaded.settings
    console = Console(highlight=False)
    with contextlib.ExitStack() as cleanup:
        status = cleanup.enter_context(console.status("starting"))
        deployment = deployment_of(
            settings.deployment,
            DemoSettings,
            loaded.config_path,
            defaults=_EVERYTHING_TRAVELS,
            on_change=lambda _: status.update(_progress(deployment)),
        )

        async def serve(drain: Drain) -> None:
            started = time.monotonic()
            async with _stopping_spinner(deployment, status):
                if await until_drain(drain, _until_ready(deployment, _ready_timeout_s(settings))):
                    return
                status.stop()
                console.print(f"[dim]everything is up after {time.monotonic() - started:.1f} s[/]\n")
                if await until_drain(drain, _ask_and_report(console, settings)):
                    return
                if settings.keep:
                    console.print(keep_lines(settings.deployment, deployment.redis_url), soft_wrap=True)
                    await until_drain(drain, deployment.wait_failed())

        try:
            return run(serve, deployment)
        except ChatFailed as error:
            status.stop()
            console.print(f"[red]no answer:[/] {error}\nlogs: {deployment.folder.log_dir}", soft_wrap=True)
            return 1


@contextlib.asynccontextmanager
async def _stopping_spinner(deployment: Deployment, status: Status) -> AsyncIterator[None]:
    async with deployment:
        try:
            yield
        finally:
            status.update("stopping")
            status.start()


def _ready_timeout_s(settings: DemoSettings) -> float:
    return settings.ready_timeout_s or _READY_TIMEOUT_S.get(settings.deployment.engine, 180.0)


def _progress(deployment: Deployment) -> str:
    return "  ".join(f"{child.name} [dim]{child.state}[/]" for child in deployment.children)


async def _until_ready(deployment: Deployment, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await deployment.wait_until_ready()
    except TimeoutError as error:
        tails = "\n".join(f"{child.name} ({child.state}):\n{child.log_tail()}" for child in deployment.children)
        raise StartupError(f"not ready after {timeout_s:g} s:\n{tails}") from error


async def _ask_and_report(console: Console, settings: DemoSettings) -> None:
    console.print(f"[bold]question[/]  {settings.question}\n[bold]answer[/]    ", end="", soft_wrap=True)
    answer = await asyncio.to_thread(_ask, console, settings)
    console.print("\n")
    console.print(report_table(answer.trace, answer.usage, answer.first_token_s, answer.seconds))


def _ask(console: Console, settings: DemoSettings) -> Answer:
    """Prints the answer as it streams. Raises ChatFailed."""
    body = {
        "model": settings.deployment.served_model.name,
        "messages": [{"role": "user", "content": settings.question}],
        "max_tokens": settings.answer_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    started = time.monotonic()
    for event in stream_chat(settings.deployment.url, body, _TRACE_HEADERS, _READ_TIMEOUT_S):
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                if answer.first_token_s is None:
                    answer.first_token_s = time.monotonic() - started
                answer.text += text
                console.print(text, end="", markup=False, soft_wrap=True)
        usage = event.get("usage") or {}
        answer.usage = answer.usage or usage
        answer.trace = answer.trace or event.get("pdq") or usage.get("pdq") or {}
    answer.seconds = time.monotonic() - started
    if not answer.text:
        raise ChatFailed("the answer is empty")
    return answer
