"""What `pdq status` and `pdq top` show: lines and tables of one moment. Fits into 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from broker.base import WorkerRecord
from broker.redis_view import RequestView
from pdq.cli.snapshot import Snapshot

_ROLE_ORDER: Final = ("gateway", "prefill", "decode")
_BAR_CELLS: Final = 10


def snapshot_lines(found: Snapshot, rates: Mapping[str, float] | None = None) -> Iterator[RenderableType]:
    """`rates`: tokens per second by worker id; None: no such column, and KV pools in blocks."""
    depth = found.depth
    yield f"[bold]{escape(found.model)}[/]"
    yield (
        f"queue: {depth.queued} queued, {depth.running} in prefill, {depth.dead} dead letters, "
        f"oldest waits {depth.oldest_wait_s:.1f} s"
    )
    gateways = [worker for worker in found.workers if worker.role == "gateway"]
    yield (
        f"tokens: {depth.queued_tokens:,} queued, {depth.running_tokens:,} in prefill   "
        f"requests in flight: {sum(worker.running + worker.waiting for worker in gateways)}"
    )
    for row in found.scale:
        problem = f"  [red]{escape(row.state.problem)}[/]" if row.state.problem else ""
        yield f"scale: {escape(row.name)} {row.wish}{problem}"
    yield _workers_table(found.workers, rates)
    if found.requests:
        yield _requests_table(found.requests)


def kv_bar(free: int, total: int) -> str:
    """How full a KV pool is."""
    used = 1 - free / total
    num_cells = round(used * _BAR_CELLS)
    return "█" * num_cells + "·" * (_BAR_CELLS - num_cells) + f" {used:4.0%}"


def _workers_table(workers: Sequence[WorkerRecord], rates: Mapping[str, float] | None) -> Table:
    """The role is the first part of a worker's id."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    if rates is None:
        table.add_column("address", overflow="fold")
    for name in ("run/wait/park", *(("free blocks",) if rates is None else ("KV pool", "tokens/s"))):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in sorted(workers, key=_order):
        cells = [worker.worker_id, worker.state]
        counts, total = f"{worker.running}/{worker.waiting}/{worker.parked}", worker.total_blocks
        if rates is None:
            blocks = f"{worker.free_blocks:,}/{total:,}" if total else "-"
            cells += [worker.http or worker.endpoint.removeprefix("tcp://"), counts, blocks]
        else:
            rate = rates.get(worker.worker_id)
            bar = kv_bar(worker.free_blocks, total) if total else "-"
            cells += [counts, bar, "-" if rate is None or not total else f"{rate:,.0f}"]
        table.add_row(*cells)
    if not workers:
        table.add_row("none")
    return table


def _order(worker: WorkerRecord) -> tuple[int, str]:
    return (_ROLE_ORDER.index(worker.role) if worker.role in _ROLE_ORDER else len(_ROLE_ORDER), worker.worker_id)


def _requests_table(requests: Sequence[RequestView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("request", "state", "worker"):
        table.add_column(name, overflow="fold")
    for name in ("gen.attempt", "tokens", "age"):
        table.add_column(name, justify="right")
    for request in requests:
        pair = f"{request.gen}.{request.attempt}"
        age = f"{request.age_s:.1f} s"
        table.add_row(request.request_id, request.state, request.worker, pair, f"{request.num_tokens:,}", age)
    return table
