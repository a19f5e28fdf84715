"""The half beside the scheduler: which requests need KV, delayed frees, renewals until the worker half claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from connector.params import ParamsError, PullProducer, params_from_ticket, parse
from connector.renewal_thread import RenewalThread
from connector.settings import ConnectorSettings
from connector.step import Expect, Load, StepMeta, TransferResults
from connector.transfers import Outcome
from pdq.wire.types import KvTicket, pack_ids

Role = Literal["producer", "consumer", "both"]

log = structlog.get_logger(__name__)

_HAS_KV = frozenset({"prefilled", "stop", "length"})
"""Ends after which the prompt's KV is complete; `stop`: the first token was EOS."""


@dataclass(slots=True)
class _Prefill:
    request: PullProducer
    num_tokens: int
    is_expected: bool = False


@dataclass(slots=True)
class _Remote:
    ticket: KvTicket
    failed: str | None
    state: Literal["waiting", "loading", "over"] = "waiting"
    is_finished: bool = False
    is_gone: bool = False
    """P said so: it needs no last word."""


class SchedulerHalf:
    """Driven by the engine loop's thread, in vLLM's order. No method waits for the network."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        engine_id: str,
        epoch: str,
        host: str,
        side_channel_port: int,
        tp_size: int,
        block_size: int,
        role: Role,
        on_progress: Callable[[], None] | None = None,
    ) -> None:
        """`side_channel_port`: where rank 0's worker half listens, see `WorkerHalf.port`.

        `on_progress` is called from another thread when `take_gone` has something, so that an idle loop wakes.
        """
        self._engine_id = engine_id
        self._epoch = epoch
        self._host = host
        self._port = side_channel_port
        self._tp_size = tp_size
        self._block_size = block_size
        self._role = role
        self._renewals = RenewalThread(settings, consumer=epoch, tp_size=tp_size, on_progress=on_progress)
        self._prefills: dict[str, _Prefill] = {}
        self._remotes: dict[str, _Remote] = {}
        self._pinned: set[str] = set()
        self._gone: dict[str, str] = {}
        self._meta = _Lists()
        self.num_dropped = 0
        """Reported ids that nobody waited for."""

    def on_new_request(self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int) -> None:
        """Raises ParamsError: the request is to be refused. D: renewals of P's lease start."""
        request = parse(kv_params)
        if request is None:
            return
        if isinstance(request, PullProducer):
            if self._role == "consumer":
                raise ParamsError("do_remote_decode: this engine is a consumer, it hands no KV over")
            self._prefills[engine_request_id] = _Prefill(request, num_tokens)
            return
        if self._role == "producer":
            raise ParamsError("do_remote_prefill: this engine is a producer, it reads no KV")
        failed = self._misfit(request.ticket, num_tokens)
        self._remotes[engine_request_id] = _Remote(request.ticket, failed)
        if failed is None:
            self._renewals.renew(engine_request_id, request.ticket)

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens to be read from P beyond `num_computed_tokens`, load is asynchronous). No side effects."""
        remote = self._remotes.get(engine_request_id)
        if remote is None or remote.state != "waiting":
            return 0, False
        num_new = min(remote.ticket.num_tokens, num_tokens) - num_computed_tokens
        return (num_new, True) if num_new > 0 else (0, False)

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """`block_ids`: all blocks of the request, in order. 0 external tokens: P is told that nobody will read."""
        prefill = self._prefills.get(engine_request_id)
        if prefill is not None and not prefill.is_expected:
            prefill.is_expected = True
            request = prefill.request
            self._meta.expected.append(
                Expect(engine_request_id=engine_request_id, transfer_id=request.transfer_id, pair=request.pair)
            )
        remote = self._remotes.get(engine_request_id)
        if remote is None or remote.state != "waiting":
            return
        ticket = remote.ticket
        self._renewals.stop(engine_request_id)
        if num_external_tokens == 0:
            remote.state = "over"
            if remote.failed is None:
                self._renewals.say_done(ticket, Outcome.OK, "found in the local prefix cache")
            return
        remote.state = "loading"
        needed = _ceil(ticket.num_tokens, ticket.block_size)
        if len(block_ids) < needed and remote.failed is None:
            remote.failed = f"{len(block_ids)} blocks were allocated, P has {needed}"
        self._meta.loads.append(
            Load(
                engine_request_id=engine_request_id,
                ticket=ticket,
                block_ids=tuple(block_ids[:needed]),
                first_block=max(ticket.num_tokens - num_external_tokens, 0) // self._block_size,
                failed=remote.failed,
            )
        )

    def build_connector_meta(self) -> StepMeta:
        """Each step, also empty ones. Resets the queues."""
        self._collect_gone()
        lists, self._meta = self._meta, _Lists()
        loads = [
            replace(load, failed=self._remotes[load.engine_request_id].failed)
            if load.failed is None and load.engine_request_id in self._remotes
            else load
            for load in lists.loads
        ]
        return StepMeta(
            expected=tuple(lists.expected),
            pinned=tuple(lists.pinned),
            forgotten=tuple(lists.forgotten),
            released=tuple(lists.released),
            loads=tuple(loads),
            cancelled=tuple(lists.cancelled),
        )

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        """(True, KV params): keep the blocks until `finished_sending`. Finish: prefilled, stop, length, aborted, error.

        D: blocks of a request whose load is active stay allocated until its id is in `finished_recving`.
        """
        prefill = self._prefills.pop(engine_request_id, None)
        if prefill is not None:
            return self._prefill_finished(engine_request_id, prefill, block_ids, finish)
        remote = self._remotes.get(engine_request_id)
        if remote is None:
            return False, None
        if remote.state == "loading":
            if not remote.is_finished:
                self._meta.cancelled.append(engine_request_id)
            remote.is_finished = True
            return False, None
        del self._remotes[engine_request_id]
        self._collect_gone()
        if remote.state == "waiting":
            self._renewals.stop(engine_request_id)
            self._gone.pop(engine_request_id, None)
            if not remote.is_gone:
                self._renewals.say_done(remote.ticket, Outcome.CANCELLED, f"{finish} before it was scheduled")
        return False, None

    def release(self, engine_request_id: str) -> None:
        """P: nobody will come for this finished prefill. Unknown ids are ignored."""
        if engine_request_id in self._pinned:
            self._meta.released.append(engine_request_id)

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        """Before the engine frees blocks. Returns the results without ids that nobody waits for (dropped, counted)."""
        sent = results.finished_sending & self._pinned
        received = {request_id for request_id in results.finished_recving if self._is_loading(request_id)}
        if dropped := (results.finished_sending - sent) | (results.finished_recving - received):
            self.num_dropped += len(dropped)
            log.error("kv_report_dropped", engine_request_ids=sorted(dropped))
        self._pinned -= sent
        for engine_request_id in received:
            remote = self._remotes[engine_request_id]
            remote.state = "over"
            if remote.is_finished:
                del self._remotes[engine_request_id]
        return replace(results, finished_sending=frozenset(sent), finished_recving=frozenset(received))

    def take_gone(self) -> dict[str, str]:
        """D: waiting requests whose KV P no longer has, with the reason; each once. Optional to ask:
        a load of such a request fails with the same reason."""
        self._collect_gone()
        gone, self._gone = self._gone, {}
        return gone

    def has_pending_meta(self) -> bool:
        """True: a step is needed, also without a request to run, since `build_connector_meta` has something to say."""
        return self._meta.has_any()

    def shutdown(self) -> None:
        """Idempotent."""
        self._renewals.close()

    def _is_loading(self, engine_request_id: str) -> bool:
        remote = self._remotes.get(engine_request_id)
        return remote is not None and remote.state == "loading"

    def _misfit(self, ticket: KvTicket, num_tokens: int) -> str | None:
        if ticket.block_size != self._block_size:
            return f"block size {ticket.block_size} at P, {self._block_size} here"
        if ticket.num_tokens > num_tokens:
            return f"P has KV of {ticket.num_tokens} tokens, the request has {num_tokens}"
        return None

    def _prefill_finished(
        self, engine_request_id: str, prefill: _Prefill, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        needed = _ceil(prefill.num_tokens, self._block_size)
        if finish not in _HAS_KV or not prefill.is_expected or len(block_ids) < needed:
            if prefill.is_expected:
                self._meta.forgotten.append(engine_request_id)
            return False, None
        self._meta.pinned.append(engine_request_id)
        self._pinned.add(engine_request_id)
        ticket = KvTicket(
            transfer_id=prefill.request.transfer_id,
            pair=prefill.request.pair,
            engine_id=self._engine_id,
            epoch=self._epoch,
            host=self._host,
            port=self._port,
            tp_size=self._tp_size,
            block_size=self._block_size,
            num_tokens=prefill.num_tokens,
            block_ids=pack_ids(block_ids[:needed]),
        )
        return True, params_from_ticket(ticket)

    def _collect_gone(self) -> None:
        for engine_request_id, reason in self._renewals.take_gone().items():
            remote = self._remotes.get(engine_request_id)
            if remote is not None and remote.state != "over":
                remote.failed = remote.failed or reason
                remote.is_gone = True
                if remote.state == "waiting":
                    self._gone[engine_request_id] = reason


class _Lists:
    """What the next step's metadata will say."""

    def __init__(self) -> None:
        self.expected: list[Expect] = []
        self.pinned: list[str] = []
        self.forgotten: list[str] = []
        self.released: list[str] = []
        self.loads: list[Load] = []
        self.cancelled: list[str] = []

    def has_any(self) -> bool:
        return any((self.expected, self.pinned, self.forgotten, self.released, self.loads, self.cancelled))


def _ceil(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
