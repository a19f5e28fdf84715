"""Who computes what in the next step: continuous batching with chunked prefill over the paged pool.

Pure but for the connector half, which it drives in vLLM's order (each method says which hooks it calls). One step is

    chunks = schedule()            decodes first, then begun prefills, then admissions, under the token budget
    ... runner and worker half ...
    update(chunks, results)        tokens appended, ends found
    on_transfers(results)          loads done or failed, pins over
    take_news()                    outputs and released ids since the last call

Why it can't lock up: a request that is alone always fits (the length limit is the pool's at most); admission leaves a
watermark for growth; when growth finds no block the youngest running request gives all of its own back; requests that
load remote KV hold their whole prompt's blocks and need none to become running.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import structlog

from connector.step import TransferResults
from engine.base import EngineOutput, EngineRequest
from engine.embedded.block_pool import BlockPool
from engine.embedded.connector_port import SchedulerPort
from engine.embedded.endings import Ending, Endings, ending_of
from engine.embedded.intake import Limits, Refused, new_request
from engine.embedded.prefix_cache import PrefixCache
from engine.embedded.request import Event, Request, State
from engine.embedded.runner import Chunk, ChunkResult
from engine.embedded.settings import EngineSettings
from engine.kv_params import kv_params

_log = structlog.get_logger(__name__)


class Scheduler:
    def __init__(
        self,
        settings: EngineSettings,
        pool: BlockPool,
        half: SchedulerPort,
        *,
        limits: Limits,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._half = half
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._watermark = settings.watermark_blocks or max(1, pool.num_blocks // 100)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # by arrival: the youngest is the last
        self._loading: dict[str, Request] = {}
        self._loaded: list[Request] = []  # not running before the next step
        self._arrivals = 0
        self.num_preemptions = 0
        self.preempted: list[str] = []  # since the last step: the connector is told before the forward
        self._prefixes = PrefixCache(pool, block_size=settings.block_size, is_enabled=settings.prefix_caching)
        self._ends = Endings(pool, half, self._requests, block_size=settings.block_size)

    # Questions.

    def counts(self) -> tuple[int, int, int]:
        """(running, waiting to start or for remote KV, pinned) requests."""
        num_waiting = len(self._waiting) + len(self._loading) + len(self._loaded)
        return len(self._running), num_waiting, self._ends.num_pinned

    @property
    def can_compute(self) -> bool:
        """A step now will compute something. False with requests waiting: they wait for blocks or for remote KV."""
        return bool(self._running or self._loaded)

    @property
    def has_waiting(self) -> bool:
        """Some request waits for blocks, or for the connector's word."""
        return bool(self._waiting)

    def state_of(self, engine_request_id: str) -> State | None:
        """None: unknown, or finished and forgotten."""
        request = self._requests.get(engine_request_id)
        return request.state if request else None

    # What comes from outside.

    def add(self, incoming: EngineRequest) -> None:
        """Queues the request, or refuses it with an error output. Hooks: on_new_request; refused: request_finished."""
        engine_request_id = incoming.engine_request_id
        if engine_request_id in self._requests:
            _log.error("duplicate_request", request_id=incoming.request_id, engine_request_id=engine_request_id)
            return
        is_known_to_half = False
        try:
            num_tokens = (len(incoming.prompt_ids) + len(incoming.generated_ids)) // 4
            self._half.on_new_request(engine_request_id, kv_params(incoming), num_tokens)
            is_known_to_half = True
            request = new_request(incoming, self._limits, arrival=self._arrivals)
        except (Refused, ValueError) as error:  # ValueError: ids of odd length, or the connector's ParamsError
            if is_known_to_half:
                self._half.request_finished(engine_request_id, [], "error")
            self._ends.refuse(engine_request_id, str(error) if isinstance(error, Refused) else f"engine_error: {error}")
            return
        self._arrivals += 1
        self._requests[engine_request_id] = request
        self._waiting.append(request)

    def abort(self, engine_request_id: str) -> None:
        """Ends it in any state, without output. Unknown and draining ones are left alone. Hook: request_finished."""
        request = self._requests.get(engine_request_id)
        if request is None or request.state is State.DRAINING:
            return
        if request.state is State.FINISHED_PINNED:
            self._half.release(engine_request_id)
        elif request.state is State.WAITING_FOR_REMOTE_KVS and request not in self._loaded:
            del self._loading[engine_request_id]
            self._ends.drain(request)
        else:
            self._remove(request)
            self._ends.end(request, Ending(finish="aborted", has_output=False))

    def release(self, engine_request_id: str) -> None:
        """A finished prefill that nobody will read. Unknown ids are left alone. Hook: release."""
        request = self._requests.get(engine_request_id)
        if request is not None and request.state is State.FINISHED_PINNED:
            self._half.release(engine_request_id)

    def fail_gone(self, gone: dict[str, str]) -> None:
        """P no longer has the KV of these requests: those that didn't start loading fail now."""
        for engine_request_id, reason in gone.items():
            request = self._requests.get(engine_request_id)
            if request is not None and request.state is State.WAITING and not request.was_admitted:
                self._waiting.remove(request)
                self._ends.end(request, Ending(finish="error", error=f"kv_transfer_failed: {reason}"))

    # One step.

    def schedule(self) -> list[Chunk]:
        """Hooks: update_state_after_alloc, get_num_new_matched_tokens. The caller builds the step's metadata next."""
        self._start_loaded()
        chunks: list[Chunk] = []
        prefills = self._schedule_decodes(chunks)
        budget = self._settings.max_num_batched_tokens - len(chunks)
        for request in prefills:
            budget -= self._schedule_prefill(request, budget, chunks)
        if self._waiting:
            self._admit(budget, chunks)
        return chunks

    def update(self, chunks: Sequence[Chunk], results: Sequence[ChunkResult]) -> None:
        """The runner has computed the chunks. Hook: request_finished."""
        block_size = self._settings.block_size
        for chunk, result in zip(chunks, results, strict=True):
            sequence = chunk.sequence
            request = self._requests[sequence.engine_request_id]
            sequence.num_computed += chunk.num_tokens
            if sequence.num_computed // block_size > request.num_published:
                self._prefixes.publish(request)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(result.prompt_logprobs)
            token_id = result.token_id
            if token_id is None:
                continue
            if request.is_prefill_only:
                self._running.remove(request)
                self._ends.end(request, Ending(finish="prefilled"))
                continue
            sequence.token_ids.append(token_id)
            ending = ending_of(request, token_id, self._eos_token_ids)
            if ending is None:
                self._ends.report(request, token_id, result.logprob)
            else:
                self._running.remove(request)
                self._ends.end(request, ending, token_id, result.logprob)

    def on_transfers(self, results: TransferResults) -> None:
        """What the worker half reported. Hooks: update_connector_output before blocks are freed; request_finished."""
        results = self._half.update_connector_output(results)
        for engine_request_id in results.finished_recving:
            request = self._loading.pop(engine_request_id, None)
            if request is None:
                self._ends.drained(engine_request_id)
                continue
            request.transfer = results.stats.get(engine_request_id)
            reason = results.failed_recving.get(engine_request_id)
            if reason is None:
                self._loaded.append(request)
            else:
                self._ends.end(request, Ending(finish="error", error=f"kv_transfer_failed: {reason}"))
        for engine_request_id in results.finished_sending:
            self._ends.sent(engine_request_id)

    def take_news(self) -> tuple[tuple[EngineOutput, ...], tuple[str, ...]]:
        """(outputs, released ids) since the last call."""
        return self._ends.take_news()

    # How a step is made.

    def _start_loaded(self) -> None:
        """The whole prompt is there; its last position is computed again, since D needs its logits."""
        for request in self._loaded:
            request.on(Event.LOADED)
            request.sequence.num_computed = len(request.sequence.token_ids) - 1
            self._prefixes.publish(request)
            self._half.update_state_after_alloc(request.engine_request_id, request.sequence.block_ids, 0)
            insort(self._running, request, key=attrgetter("arrival"))
        self._loaded.clear()

    def _schedule_decodes(self, chunks: list[Chunk]) -> list[Request]:
        """Adds one chunk per decoding request, taking blocks where they grow; returns those that still prefill."""
        block_size, running = self._settings.block_size, self._running
        prefills: list[Request] = []
        index = 0
        while index < len(running):
            request = running[index]
            sequence = request.sequence
            num_known = len(sequence.token_ids)
            if sequence.num_computed < num_known - 1:
                prefills.append(request)
            elif num_known <= len(sequence.block_ids) * block_size or self._grow(request):
                chunks.append(request.decode_chunk)
            else:
                break  # it was the youngest and has been preempted
            index += 1
        return [request for request in prefills if request.state is State.RUNNING]

    def _grow(self, request: Request) -> bool:
        """One more block, if need be from the youngest. False: it was the youngest itself and has been preempted."""
        while not self._pool.can_allocate(1):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        request.sequence.block_ids += self._pool.allocate(1)
        return True

    def _preempt(self, victim: Request) -> None:
        """All blocks go back; it is computed again, with what it has generated, when there is room."""
        self._pool.free(victim.sequence.block_ids)
        victim.displace()
        self.num_preemptions += 1
        self.preempted.append(victim.engine_request_id)
        self._waiting.appendleft(victim)
        _log.info("request_preempted", engine_request_id=victim.engine_request_id)

    def _schedule_prefill(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """As much as the budget allows; returns how many tokens."""
        sequence = request.sequence
        missing = len(sequence.token_ids) - sequence.num_computed
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            chunks.append(Chunk(sequence, num_tokens, num_tokens == missing))
        return max(num_tokens, 0)

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        """First come, first served: the head of the queue waits for room, and those behind it too."""
        undecided: list[Request] = []
        while self._waiting and len(self._running) + len(self._loading) < self._settings.max_num_seqs:
            request = self._waiting[0]
            sequence = request.sequence
            num_tokens = len(sequence.token_ids)
            prefix = self._prefixes.find(request)
            num_local = len(prefix) * self._settings.block_size
            num_external, is_async = self._half.get_num_new_matched_tokens(
                request.engine_request_id, num_tokens, num_local
            )
            if num_external is None:  # not known yet: asked again in the next step
                undecided.append(self._waiting.popleft())
                continue
            assert is_async == bool(num_external), "loads inside the forward are not supported"
            num_new = -(-num_tokens // self._settings.block_size) - len(prefix)
            watermark = self._watermark if self._running or self._loading else 0
            has_room = self._pool.can_allocate(num_new + watermark, beside=prefix)
            if not has_room or (budget <= 0 and not num_external):
                break
            self._waiting.popleft()
            self._pool.share(prefix)
            request.place(prefix, self._pool.allocate(num_new), num_local)
            self._half.update_state_after_alloc(request.engine_request_id, sequence.block_ids, num_external)
            if num_external:
                request.on(Event.ADMITTED_REMOTE)
                self._loading[request.engine_request_id] = request
            else:
                request.on(Event.ADMITTED)
                insort(self._running, request, key=attrgetter("arrival"))
                budget -= self._schedule_prefill(request, budget, chunks)
        self._waiting.extendleft(reversed(undecided))

    def _remove(self, request: Request) -> None:
        if request.state is State.WAITING:
            self._waiting.remove(request)
        elif request.state is State.RUNNING:
            self._running.remove(request)
        else:
            self._loaded.remove(request)
