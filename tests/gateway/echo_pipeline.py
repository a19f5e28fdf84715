"""Stands for all workers: takes jobs from a MemoryQueue, asks Admit and sends Deltas over real sockets.

It echoes the prompt, one token a step, over and over until max_tokens. `Script` says how a request goes wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from broker.base import JobLease, PrefillQueue, Registry, WorkerRecord
from broker.links import DeltaSender, DeltaSettings, NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.messages import (
    Admit,
    Cancel,
    Cancelled,
    DecodeStats,
    Delta,
    Failed,
    Go,
    Notice,
    PromptLogprobs,
)
from pdq.wire.types import Capability, Pair, TokenLogprob, TransferStats, pack_ids, unpack_ids

EOS = 257
LIMIT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Script:
    """What becomes of one job."""

    is_held: bool = False
    """Taken, and nothing more."""
    fail_after: int | None = None
    """Tokens before Failed."""
    fail_code: str = "engine_error"
    is_retryable: bool = False
    stall_after: int | None = None
    """Tokens before silence."""
    forgets_after: int | None = None
    """Tokens before it knows nothing of the request any more, and says so to nobody."""
    eos_after: int | None = None
    cut_after: int | None = None
    """Tokens before it ends at a limit of its own, as if max_tokens were reached."""
    loses_finish: bool = False
    """Fails after the last token, without having said that it is the last."""
    fails_after_end: bool = False
    """Says Failed after its last token, too."""
    has_logprobs: bool = True
    gate: asyncio.Semaphore | None = None
    """One permit per token, and for the failure."""


@dataclass(slots=True, kw_only=True)
class EchoPipeline:
    worker_id: str
    endpoint: str
    queue: PrefillQueue
    inbox: NoticeInbox
    peers: NoticePeers
    deltas: DeltaSender
    script: Callable[[JobLease], Script] = lambda lease: Script()
    cancels: asyncio.Queue[Cancel] = field(default_factory=asyncio.Queue)
    taken: asyncio.Queue[JobLease] = field(default_factory=asyncio.Queue)
    answers: list[Notice] = field(default_factory=list)
    tasks: dict[tuple[str, Pair], asyncio.Task[None]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """Ids of requests, from Admit on."""
    step: int = 0

    def record(self, role: str, **fields: int) -> WorkerRecord:
        return WorkerRecord(
            worker_id=f"{role}-{self.worker_id}",
            role=role,
            state="ready",
            endpoint=self.endpoint,
            model="sim",
            fingerprint="same=1",
            capabilities=" ".join(Capability),
            **fields,
        )

    def on_notice(self, message: Notice, reply: NoticeReply) -> None:
        assert isinstance(message, Cancel)
        self.cancels.put_nowait(message)
        for (request_id, pair), task in self.tasks.items():
            if request_id == message.request_id and pair <= message.pair:
                task.cancel()
                self.open.discard(request_id)
        reply(Cancelled(request_id=message.request_id, pair=message.pair))

    async def next_cancel(self) -> Cancel:
        """Fails instead of waiting for ever."""
        async with asyncio.timeout(LIMIT_S):
            return await self.cancels.get()

    async def take_forever(self) -> None:
        while True:
            taken = await self.queue.take(f"prefill-{self.worker_id}", max_tokens=10**9, max_jobs=100)
            for lease in taken.leases:
                self.taken.put_nowait(lease)
                serving = asyncio.create_task(self.serve(lease, self.script(lease)))
                self.tasks[lease.job.request_id, lease.pair] = serving
            if not taken.leases:
                await self.queue.wait(10)

    async def serve(self, lease: JobLease, script: Script) -> None:
        job = lease.job
        if script.is_held:
            return
        if job.sampling.prompt_logprobs is not None:
            await self.peers.request(job.gateway, prompt_logprobs(lease))
        self.open.add(job.request_id)
        answer = await self.peers.request(job.gateway, self.admit(lease))
        self.answers.append(answer)
        await self.queue.settle(lease, state="done")
        if not isinstance(answer, Go):
            self.open.discard(job.request_id)
            return
        self.deltas.open(job.gateway)
        prompt, generated = unpack_ids(job.prompt_ids), unpack_ids(job.generated_ids)
        for seq in range(job.sampling.max_tokens - len(generated)):
            if script.stall_after == seq:
                return
            if script.forgets_after == seq:
                self.open.discard(job.request_id)
                return
            if script.gate is not None:
                await script.gate.acquire()
            if script.fail_after == seq:
                await self.fail(lease, script)
                return
            index = seq + len(generated)
            is_eos = script.eos_after == seq
            is_last = is_eos or index + 1 == job.sampling.max_tokens or script.cut_after == seq + 1
            token_id = EOS if is_eos else prompt[index % len(prompt)]
            self.push(lease, script, seq, token_id, is_eos=is_eos, is_last=is_last and not script.loses_finish)
            await asyncio.sleep(0)
            if is_last and (script.loses_finish or script.fails_after_end):
                await self.deltas.drained(LIMIT_S)  # Failed goes another way, and may be faster
                await self.fail(lease, script)
            if is_last:
                self.open.discard(job.request_id)
                return

    async def stop(self) -> None:
        """As if the process had died. May be called twice."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        self.tasks.clear()
        await self.deltas.close()
        await self.peers.close()
        await self.inbox.close()
        crashes = [end for end in ends if isinstance(end, Exception)]
        assert not crashes, crashes

    def push(self, lease: JobLease, script: Script, seq: int, token_id: int, *, is_eos: bool, is_last: bool) -> None:
        sampling = lease.job.sampling
        logprobs = None
        if sampling.logprobs is not None and script.has_logprobs:
            logprobs = (logprob_of(token_id, sampling.logprobs),)
        stats = DecodeStats(cached_tokens=0, transfer=TransferStats(num_bytes=4096, num_descriptors=2, seconds=0.001))
        delta = Delta(
            request_id=lease.job.request_id,
            pair=lease.pair,
            seq=seq,
            token_ids=pack_ids([token_id]),
            logprobs=logprobs,
            finish=("stop" if is_eos else "length") if is_last else None,
            stop_token_id=EOS if is_eos else None,
            stats=stats if is_last else None,
        )
        self.step += 1
        self.deltas.push(lease.job.gateway, self.step, (delta,))

    def admit(self, lease: JobLease) -> Admit:
        return Admit(
            request_id=lease.job.request_id,
            pair=lease.pair,
            worker=self.worker_id,
            endpoint=self.endpoint,
            prefill_worker=f"prefill-{self.worker_id}",
            queue_wait_s=lease.queue_wait_s,
            prefill_s=0.01,
            cached_tokens=3,
            frame=self.deltas.next_frame(lease.job.gateway),
        )

    async def fail(self, lease: JobLease, script: Script) -> None:
        failed = Failed(
            request_id=lease.job.request_id,
            pair=lease.pair,
            worker=self.worker_id,
            code=script.fail_code,
            detail="as scripted,\nwith a line break",
            retryable=script.is_retryable,
        )
        self.open.discard(lease.job.request_id)
        await self.peers.request(lease.job.gateway, failed)


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    others = tuple(range(97, 97 + num_top))
    return TokenLogprob(
        token_id=token_id, logprob=-0.5, top_ids=others, top_logprobs=tuple(-1.0 - n for n in range(num_top))
    )


def prompt_logprobs(lease: JobLease) -> PromptLogprobs:
    ids = unpack_ids(lease.job.prompt_ids)
    num_top = lease.job.sampling.prompt_logprobs or 0
    return PromptLogprobs(
        request_id=lease.job.request_id,
        pair=lease.pair,
        positions=(None, *(logprob_of(token_id, num_top) for token_id in ids[1:])),
    )


@asynccontextmanager
async def echo_pipeline(
    queue: PrefillQueue, registry: Registry, *, worker_id: str = "decode-echo", takes: bool = True
) -> AsyncIterator[EchoPipeline]:
    """Registered as one prefill and one decode worker."""
    settings = NoticeSettings(notice_tries=150)  # a gateway that is busy may answer late
    inbox = NoticeInbox(settings, worker_id=worker_id)
    peers = NoticePeers(settings, worker_id=worker_id)
    deltas = DeltaSender(
        DeltaSettings(sign_of_life_s=0.1),
        worker_id=worker_id,
        on_overflow=lambda gateway: None,
        owes=lambda gateway: tuple(pipeline.open),
    )
    pipeline = EchoPipeline(
        worker_id=worker_id, endpoint=inbox.endpoint, queue=queue, inbox=inbox, peers=peers, deltas=deltas
    )
    await inbox.start(pipeline.on_notice)
    for role in ("prefill", "decode"):
        await registry.heartbeat(pipeline.record(role))
    if takes:
        pipeline.tasks["take", Pair(gen=0, attempt=0)] = asyncio.create_task(pipeline.take_forever())
    try:
        yield pipeline
    finally:
        await pipeline.stop()
