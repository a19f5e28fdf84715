"""What the demo shows after the answer: the table, and lines to try while everything stays up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from pdq.cli.deployment_settings import DeploymentSettings


def report_table(
    trace: Mapping[str, Any], usage: Mapping[str, Any], first_token_s: float | None, seconds: float
) -> Table:
    """`trace`: the gateway's `pdq` object; what it lacks is shown as `-`."""
    table = Table(title="one request through the pipeline", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    completion = usage.get("completion_tokens")
    rows = [
        ("mode", trace.get("mode", "-")),
        ("prefill worker", trace.get("prefill_worker") or "-"),
        ("decode worker", trace.get("decode_worker", "-")),
        ("prompt tokens", _number(usage.get("prompt_tokens"))),
        ("output tokens", _number(completion) + _rate(completion, first_token_s, seconds)),
        ("queue wait", _ms(trace.get("queue_wait_ms"))),
        ("prefill", _ms(trace.get("prefill_ms") or None)),
        ("time to first token", _ms(_first_token_ms(trace, first_token_s))),
        ("KV moved", _moved(trace)),
        ("whole request", f"{seconds:.2f} s"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    return table


def keep_lines(settings: DeploymentSettings, redis_url: str) -> str:
    """Commands to try, as they can be pasted."""
    port = redis_url.rpartition(":")[2].partition("/")[0]
    model = settings.served_model.name
    key = f"pdq:{{{model}}}"
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hi!"}}]}}'
    return "\n".join(
        [
            "",
            "[bold]everything stays up; Ctrl-C stops it.[/] To try:",
            "",
            f"  curl -N {settings.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            f"  curl {settings.url}/v1/models",
            f"  redis-cli -p {port} zrange '{key}:workers' 0 -1",
            f"  redis-cli -p {port} xinfo stream '{key}:prefill'",
            f"  redis-cli -p {port} --scan --pattern '{key}:req:*'",
            f"  .venv/bin/pdq status --redis {redis_url}",
            "",
        ]
    ).replace("[{", r"\[{")


def _first_token_ms(trace: Mapping[str, Any], first_token_s: float | None) -> float | None:
    if trace.get("ttft_ms") is not None:
        return float(trace["ttft_ms"])
    return None if first_token_s is None else first_token_s * 1000


def _moved(trace: Mapping[str, Any]) -> str:
    num_bytes, ms = trace.get("kv_bytes"), trace.get("kv_ms")
    if num_bytes is None:
        return "-"
    parts = [f"{num_bytes / 1e6:.2f} MB"]
    if trace.get("kv_descriptors") is not None:
        num = trace["kv_descriptors"]
        parts.append(f"as {num} piece{'' if num == 1 else 's'}")
    if ms:
        rate = num_bytes / ms / 1e3
        parts.append(f"in {ms:.1f} ms: " + (f"{rate / 1e3:.2f} GB/s" if rate >= 1e3 else f"{rate:.1f} MB/s"))
    if ms and trace.get("kv_hidden_ms"):
        parts.append(f"({trace['kv_hidden_ms'] / ms:.0%} of it while the prefill ran)")
    return " ".join(parts)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _rate(num_tokens: int | None, first_token_s: float | None, seconds: float) -> str:
    """Of the tokens after the first one."""
    if num_tokens is None or num_tokens < 2 or first_token_s is None or seconds <= first_token_s:
        return ""
    return f" ({(num_tokens - 1) / (seconds - first_token_s):.0f} tokens/s after the first)"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"
