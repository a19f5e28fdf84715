"""vLLM's scheduler, as far as a connector can tell: queues, blocks, preemption, each assertion that kills the core."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace as Values
from typing import Any

from tests.connector_plugin.fake_pool import Pool, next_token
from tests.connector_plugin.fake_vllm import CachedRequestData, NewRequestData, SchedulerOutput

Status = enum.Enum(
    "Status",
    "WAITING WAITING_FOR_REMOTE_KVS RUNNING PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED"
    " FINISHED_ERROR",
)


@dataclass(eq=False)
class Request:
    request_id: str
    ids: list[int]
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None
    skip_reading_prefix_cache: bool = False
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")


class FakeScheduler:
    def __init__(
        self, connector: Any, *, num_blocks: int, block_size: int, recompute: bool, budget: int, is_current: bool
    ) -> None:
        self.connector, self.budget = connector, budget
        self._recompute, self._is_current = recompute, is_current
        self.pool = Pool(num_blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ends: dict[str, tuple[str, list[int], dict[str, Any] | None]] = {}
        """Ended requests: (status, generated ids, KV params that went out)."""
        self.news: list[dict[str, Any]] = []
        self.num_preemptions = 0
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()
        self._finished_req_ids: set[str] = set()
        self._preempted: set[str] = set()

    def has_requests(self) -> bool:
        is_pushing = self._is_current and self.connector.has_pending_push_work()
        return bool(self.requests or self._finished_req_ids or is_pushing)

    def add(self, request: Request, *, abort_immediately: bool = False) -> None:
        assert request.request_id not in self.requests
        request.num_prompt_tokens = len(request.ids)
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)
        if abort_immediately:
            self.finish([request.request_id], Status.FINISHED_ABORTED)

    def finish(self, request_ids: Iterable[str], status: Status) -> None:
        """Unknown and finished ones are left alone."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.is_finished:
                continue
            queue = self.running if request in self.running else self.waiting
            queue.remove(request)
            is_delayed = False
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                is_delayed = request_id not in self._finished_recving
                self._finished_recving.discard(request_id)
                self._failed_recving.discard(request_id)
            request.status = status
            self._free(request, is_delayed=is_delayed)

    def preempt_all(self) -> None:
        """As `reset_prefix_cache(reset_running_requests=True)` does."""
        while self.running:
            self._preempt()

    # One step.

    def schedule(self) -> SchedulerOutput:
        new: list[NewRequestData] = []
        cached = CachedRequestData()
        tokens: dict[str, int] = {}
        num_preemptions, budget = self.num_preemptions, self.budget
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            if num_new <= 0:
                continue
            added = self._grow(request, num_new)
            if added is None:
                break
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((added,) if added else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            tokens[request.request_id] = num_new
            budget -= num_new
        if self.num_preemptions == num_preemptions:
            self._admit(budget, new, cached, tokens)
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=self._preempted,
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        for request_id, num_new in tokens.items():
            self.requests[request_id].num_computed_tokens += num_new
        self._finished_req_ids, self._preempted = set(), set()
        return output

    def update(self, scheduler_output: SchedulerOutput, output: Any) -> None:
        """Takes what the workers report, in vLLM's order."""
        if not self._is_current and output.kv_connector_stats is not None:
            self._take_stats(output.kv_connector_stats)
        failed = self._failed(output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished or request_id in failed:
                continue
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.ids.append(next_token(request.ids))
            self.pool.cache(request.ids, request.blocks, request.num_computed_tokens)
            if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                self.running.remove(request)
                request.status = Status.FINISHED_LENGTH_CAPPED
                self._free(request)
        if not self._recompute:
            self.finish(failed, Status.FINISHED_ERROR)
        self.connector.update_connector_output(output)
        for request_id in output.finished_recving or ():
            request = self.requests[request_id]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._finished_recving.add(request_id)
            else:
                assert request.is_finished, f"{request_id} was reported while {request.status}"
                self._drop(request)
        for request_id in output.finished_sending or ():
            assert self.requests[request_id].is_finished, f"{request_id} was sent before it ended"
            self._drop(self.requests[request_id])
        if self._is_current:
            self._take_stats(output.kv_connector_stats)

    # How it is done.

    def _grow(self, request: Request, num_new: int) -> list[int] | None:
        while True:
            needed = -(-(request.num_computed_tokens + num_new) // self.pool.block_size) - len(request.blocks)
            added = self.pool.allocate(max(needed, 0))
            if added is not None:
                request.blocks += added
                return added
            if self._is_current and self.connector.has_pending_block_frees():
                return None
            if self._preempt() is request:
                return None

    def _preempt(self) -> Request:
        victim = self.running.pop()
        self.pool.free(victim.blocks)
        victim.blocks, victim.num_computed_tokens, victim.status = [], 0, Status.PREEMPTED
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.insert(0, victim)
        self._preempted.add(victim.request_id)
        return victim

    def _admit(self, budget: int, new: list[NewRequestData], cached: CachedRequestData, tokens: dict[str, int]) -> None:
        for request in sorted(self.waiting, key=lambda request: not request.blocks):  # those that hold blocks first
            if budget <= 0:
                return
            if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._promote(request):
                continue
            shared: list[int] = []
            num_local = num_external = 0
            is_async = False
            if request.num_computed_tokens == 0:
                if not request.skip_reading_prefix_cache:
                    shared = self.pool.prefix(request.ids)
                num_local = len(shared) * self.pool.block_size
                found, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
                assert found or not is_async, "(0, True) is not allowed"
                if request.skip_reading_prefix_cache:
                    found, is_async = 0, False
                if found is None:
                    continue
                num_external = found
            num_computed = request.num_computed_tokens or num_local + num_external
            assert num_computed <= request.num_tokens
            num_new = 0 if is_async else min(request.num_tokens - num_computed, budget)
            num_held = len(request.blocks) or len(shared)
            needed = -(-(num_computed + num_new) // self.pool.block_size) - num_held
            added = self.pool.allocate(max(needed, 0), [] if request.blocks else shared)
            if added is None:
                return
            request.blocks = (request.blocks or shared) + added
            self.connector.update_state_after_alloc(request, _blocks(request), num_external)
            request.num_computed_tokens = num_computed
            if is_async:
                request.status = Status.WAITING_FOR_REMOTE_KVS
                continue
            self.waiting.remove(request)
            self.running.append(request)
            if request.status is Status.WAITING:
                new.append(NewRequestData(request.request_id, (list(request.blocks),), num_computed))
            else:
                cached.req_ids.append(request.request_id)
                cached.resumed_req_ids.add(request.request_id)
                cached.new_block_ids.append((list(request.blocks),))
                cached.num_computed_tokens.append(num_computed)
            request.status = Status.RUNNING
            tokens[request.request_id] = num_new
            budget -= num_new

    def _promote(self, request: Request) -> bool:
        """A load has ended: the request waits as others do, with what is computed."""
        if request.request_id not in self._finished_recving:
            return False
        if request.request_id in self._failed_recving:
            self._failed_recving.discard(request.request_id)
            if not request.num_computed_tokens:
                self.pool.free(request.blocks)
                request.blocks = []
        else:
            self.pool.cache(request.ids, request.blocks, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
        self._finished_recving.discard(request.request_id)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _failed(self, output: Any) -> set[str]:
        failed = set()
        for request in self.requests.values():
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            bad = [index for index, block in enumerate(request.blocks) if block in output.invalid_block_ids]
            if request.request_id in output.failed_recving or bad:
                failed.add(request.request_id)
                if self._recompute:
                    request.num_computed_tokens = min(bad, default=0) * self.pool.block_size
                    self._failed_recving.add(request.request_id)
        return failed

    def _free(self, request: Request, *, is_delayed: bool = False) -> None:
        num_blocks = -(-request.num_computed_tokens // self.pool.block_size)
        is_kept, params = self.connector.request_finished_all_groups(request, (request.blocks[:num_blocks],))
        generated = request.ids[request.num_prompt_tokens :]
        self.ends[request.request_id] = request.status.name, generated, params
        self._finished_req_ids.add(request.request_id)
        if not (is_kept or is_delayed):
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks = []
        del self.requests[request.request_id]

    def _take_stats(self, of_workers: Any) -> None:
        own = self.connector.get_kv_connector_stats()
        stats = of_workers
        if own is not None and not own.is_empty():
            stats = own if of_workers is None else of_workers.aggregate(own)
        if stats is not None and not stats.is_empty():
            self.news.append(stats.data)


def _blocks(request: Request) -> Any:
    return Values(get_block_ids=lambda allow_none=False: (list(request.blocks),))
