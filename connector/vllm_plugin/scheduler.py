"""The plugin beside vLLM's scheduler: its hooks -> `SchedulerHalf`, and the half's news for whoever submitted requests.

vLLM dies of an exception in a hook, and of a finished id that it does not wait for. So bad KV params become a load that
fails (D) or a prefill without a ticket (P), and reported ids that nobody waits for are taken out of vLLM's output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from connector.failure_kinds import FAILED, kind_of
from connector.params import ParamsError, is_push, is_release, outside_id, wants_load, with_identity
from connector.pinned_prefills import HAS_KV
from connector.scheduler_half import SchedulerHalf
from connector.step import TransferResults
from connector.vllm_plugin.hooks import HookGeneration
from connector.vllm_plugin.news import OutsideNews, PluginStep, WorkerNews, joined_stats
from connector.vllm_plugin.settings import PluginSettings
from connector.vllm_plugin.steps import BlockTables
from pdq.wire.types import TransferStats

log = structlog.get_logger(__name__)

_FINISH: Final[Mapping[str, str]] = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ERROR": "error",
}
"""vLLM's RequestStatus -> the half's word; all others: aborted."""
_FREED_SOON_S: Final = 1.0
"""Blocks of a prefill that ended less than this ago are worth waiting for; of an older one the reader may be dead."""


@dataclass(slots=True)
class _Request:
    outside_id: str | None
    refusal: str = ""
    """D: its KV params are bad, the load must fail."""
    is_refused: bool = False
    """That load has not begun."""
    num_local: int = 0
    """Tokens found in the local prefix cache when last asked."""
    num_external: int = 0
    """Tokens that are to come, or came, from P."""
    is_ended: bool = False
    """Its blocks stay allocated until it is reported."""


class PluginScheduler:
    """Driven by the engine core's thread. No method raises for what a client sent, none waits for the network."""

    def __init__(
        self,
        settings: PluginSettings,
        generation: HookGeneration,
        *,
        can_push: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._generation = generation
        self._can_push = can_push
        self._clock = clock
        connector = settings.connector
        self._half = SchedulerHalf(
            connector,
            engine_id=settings.engine_id,
            epoch=settings.epoch,
            host=connector.side_channel_host,
            side_channel_port=connector.side_channel_port,
            tp_size=settings.tp_size,
            block_size=settings.block_size,
            role=settings.role,
        )
        self._tables = BlockTables(settings.group)
        self._requests: dict[str, _Request] = {}
        self._inside: dict[str, str] = {}
        """Outside id -> vLLM's id, which has a suffix that vLLM chose."""
        self._refused: list[tuple[str, str]] = []
        self._failing: set[str] = set()
        """Refused loads that vLLM waits for, until they are reported: also of requests that have ended since."""
        self._external: list[tuple[str, tuple[int, ...]]] = []
        self._num_kept, self._kept_at = 0, 0.0
        """Finished prefills that hold blocks, and when the last one ended."""
        self._stats: dict[str, TransferStats] = {}
        self._failed: dict[str, str] = {}
        self._announced: dict[str, int] = {}
        self._news = OutsideNews()

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if is_release(params):
            if (released := self._inside.get(outside_id(params) or "")) is not None:
                self._half.release(released)
            return
        engine_request_id = request.request_id
        followed = self._requests[engine_request_id] = _Request(outside_id(params))
        if followed.outside_id is not None:
            self._inside[followed.outside_id] = engine_request_id
        try:
            if is_push(params) and not self._can_push:
                raise ParamsError("pdq_push: this engine's connector pulls only: PdqMooncakeLayerwiseConnector pushes")
            params = with_identity(params, engine_request_id)
            self._half.on_new_request(engine_request_id, params, request.num_tokens)
        except ParamsError as error:
            log.warning("kv_params_refused", engine_request_id=engine_request_id, cause=str(error))
            followed.refusal = f"kv params: {error}"
            if wants_load(params):
                followed.is_refused = True
            else:
                self._fail(followed, followed.refusal)
        if self._half.is_pushing(engine_request_id):
            self._tables.follow(engine_request_id)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        followed = self._requests.get(request.request_id)
        if followed is None:
            return 0, False
        followed.num_local = num_computed_tokens
        if followed.is_refused:
            num_missing = request.num_tokens - num_computed_tokens
            return num_missing, num_missing > 0
        return self._half.get_num_new_matched_tokens(request.request_id, request.num_tokens, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        engine_request_id = request.request_id
        followed = self._requests.get(engine_request_id)
        if followed is None:
            return
        block_ids = blocks.get_block_ids()[self._settings.group]
        followed.num_external = followed.num_external or num_external_tokens
        if followed.is_refused:
            followed.is_refused = False
            if num_external_tokens:
                self._failing.add(engine_request_id)
                self._refused.append((engine_request_id, followed.refusal))
        else:
            self._half.update_state_after_alloc(engine_request_id, block_ids, num_external_tokens)
        if num_external_tokens and not self._generation.has_failed_recving:
            size = self._settings.block_size
            end = -(-(followed.num_local + num_external_tokens) // size)
            self._external.append((engine_request_id, tuple(block_ids[followed.num_local // size : end])))

    def build_connector_meta(self, scheduler_output: Any) -> PluginStep:
        meta = self._half.build_connector_meta(
            self._tables.chunks(scheduler_output), scheduler_output.preempted_req_ids or ()
        )
        self._half.take_gone()  # vLLM has no way to fail a request that waits: its load will fail, with the same reason
        refused, self._refused = self._refused, []
        external, self._external = self._external, []
        return PluginStep(
            meta=meta,
            refused=tuple(refused),
            external=tuple(external),
            has_news=bool(self._news),
            may_wait=not scheduler_output.num_scheduled_tokens and self._has_kv_under_way(),
        )

    def request_finished(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        engine_request_id = request.request_id
        followed = self._requests.get(engine_request_id)
        if followed is None:
            return False, None
        self._tables.forget(engine_request_id)
        is_loading = engine_request_id in self._failing or self._half.is_loading(engine_request_id)
        finish = _FINISH.get(request.status.name, "aborted")
        is_kept, params = self._half.request_finished(engine_request_id, block_ids[self._settings.group], finish)
        if is_kept:
            self._num_kept += 1
            self._kept_at = self._clock()
            if finish in HAS_KV:
                self._news.count("tokens_sent", request.num_prompt_tokens)
        if is_kept or is_loading:
            followed.is_ended = True
        else:
            self._free(engine_request_id)
        return is_kept, params

    def update_connector_output(self, output: Any, news: WorkerNews | None) -> None:
        """`output`: vLLM's KVConnectorOutput, from which ids are taken out that nobody waits for."""
        if news is not None:
            self._take_worker_news(news)
        if not output.finished_sending and not output.finished_recving:
            return
        received = frozenset(output.finished_recving or ())
        refused = received & self._failing
        results = TransferResults(
            finished_sending=frozenset(output.finished_sending or ()), finished_recving=received - refused
        )
        num_reports = len(results.finished_sending) + len(results.finished_recving)
        results = self._half.update_connector_output(results)
        num_kept = len(results.finished_sending) + len(results.finished_recving)
        if num_kept < num_reports:
            self._news.count("reports_dropped", num_reports - num_kept)
        self._num_kept -= len(results.finished_sending)
        output.finished_sending = set(results.finished_sending)
        output.finished_recving = set(results.finished_recving | refused)
        self._failing -= refused
        for engine_request_id in (*output.finished_sending, *output.finished_recving):
            self._end(engine_request_id)
            self._announced.pop(engine_request_id, None)

    def has_pending_push_work(self) -> bool:
        return bool(self._news) or self._half.has_pending_meta()

    def has_pending_block_frees(self) -> bool:
        return self._num_kept > 0 and self._clock() - self._kept_at < _FREED_SOON_S

    def take_news(self) -> dict[str, Any]:
        """See `OutsideNews.take`."""
        return self._news.take()

    def shutdown(self) -> None:
        """Idempotent."""
        self._half.shutdown()

    def _has_kv_under_way(self) -> bool:
        return self.has_pending_block_frees() or any(map(self._half.is_loading, self._requests))

    def _take_worker_news(self, news: WorkerNews) -> None:
        self._stats = joined_stats(self._stats, news.stats)
        self._failed = news.failed | self._failed
        self._news.fatal = news.fatal or self._news.fatal
        for name, number in news.counts.items():
            self._news.count(name, number)
        for engine_request_id, num_ranks in news.ended.items():
            total = self._announced.get(engine_request_id, 0) + num_ranks
            self._announced[engine_request_id] = total
            if total == self._settings.tp_size:
                self._end(engine_request_id)

    def _end(self, engine_request_id: str) -> None:
        """All ranks are through with it: its load has succeeded or failed, or its blocks are free."""
        stats, reason = self._stats.pop(engine_request_id, None), self._failed.pop(engine_request_id, None)
        followed = self._requests.get(engine_request_id)
        if followed is None:
            return
        if reason is not None:
            self._fail(followed, reason)
        elif stats is not None:
            self._news.observe(stats)
            self._news.count("tokens_used", followed.num_external)
            if followed.outside_id is not None:
                self._news.transfers[followed.outside_id] = stats
        if followed.is_ended:
            self._free(engine_request_id)

    def _fail(self, followed: _Request, reason: str) -> None:
        self._news.count(f"{FAILED}{kind_of(reason)}")
        if followed.outside_id is not None:
            self._news.failed[followed.outside_id] = reason

    def _free(self, engine_request_id: str) -> None:
        """The only place where a request is forgotten, so that its release is told once."""
        outside = self._requests.pop(engine_request_id).outside_id
        if outside is not None:
            self._news.released.append(outside)
            if self._inside.get(outside) == engine_request_id:
                del self._inside[outside]
