"""P's side of all pushes of one rank: what may be written where, and when its blocks are free. Pure.

A push joins three things that come in any order: the engine's request, D's RECV_READY, and layers that become final.
What is final when D's rank has opened its memory is written at once, later layers one by one; so a late RECV_READY
only means that everything is written at the end. What is to be done comes out of `take_actions`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from connector.layout import KvRegion
from connector.legs import Send
from connector.push_course import OVER, PushCourse
from connector.push_legs import Outgoing, PushAction, PushReport, ReplyTo, StopWrites
from connector.push_states import PushEvent, PushState
from connector.settings import ConnectorSettings
from connector.side_channel import (
    Answer,
    Cancel,
    Cancelled,
    Gone,
    Hello,
    Meta,
    Opened,
    PushAck,
    RecvNoted,
    RecvReady,
    Reject,
)
from connector.step import Push, Save, StopPush
from connector.transfers import USED_TWICE, Outcome, TransferKey
from pdq.wire.types import TransferStats

_MAX_RETRIES = 3
NO_READER = "no reader came"


class Pushes:
    """`now` is in seconds of a monotonic clock. Ids, keys and answers that are not known (any more) are ignored."""

    def __init__(self, settings: ConnectorSettings, *, hello: Hello, regions: Sequence[KvRegion]) -> None:
        """`hello`: who this rank is; its epoch is filled in per peer."""
        self._settings = settings
        self._course = PushCourse(settings, hello=hello, regions=regions, on_settled=self._settled)
        self._ids = itertools.count(1)
        self._pushes: dict[TransferKey, Outgoing] = {}
        self._by_push_id: dict[int, Outgoing] = {}
        self._by_request: dict[str, Outgoing] = {}
        self._unfollowed: dict[str, TransferKey] = {}
        """Requests whose key another one has: nobody can be told of them."""
        self._saving: list[tuple[Outgoing, Save, int]] = []
        """What the running step makes final: (push, save, blocks after it)."""
        self._cancelled_early: dict[TransferKey, set[str]] = {}
        """Consumers that cancelled what P didn't know yet."""
        self._tombstones: deque[tuple[float, TransferKey]] = deque()

    def __len__(self) -> int:
        """Pushes that have not ended."""
        return sum(push.state is not PushState.ENDED for push in self._pushes.values())

    # What P's own engine says.

    def expect(self, request: Push, now: float) -> None:
        """The prefill is known here; RECV_READY, or a cancel, may have come before. A repeated id is ignored."""
        key = TransferKey(transfer_id=request.transfer_id, pair=request.pair)
        push = self._pushes.get(key) or self._new(key, now)
        if request.engine_request_id in self._by_request:
            return
        if push.request is not None:
            self._unfollowed[request.engine_request_id] = key
            return
        push.request = request
        push.is_left = push.is_settled = False
        self._by_request[request.engine_request_id] = push
        if push.ready is not None and push.state not in OVER:
            self._course.check_fit(push, now)

    def preempt(self, engine_request_ids: Iterable[str]) -> None:
        """Their blocks are gone; everything will be computed, and written, once more. See `is_quiet`."""
        for engine_request_id in engine_request_ids:
            push = self._by_request.get(engine_request_id)
            if push is None:
                continue
            push.blocks.clear()
            push.final.clear()
            push.queued.clear()
            push.complete_at = None
            if push.jobs:
                self._course.actions.append(StopWrites(push_id=push.push_id))

    def is_quiet(self, engine_request_id: str) -> bool:
        """No call reads blocks of this request."""
        push = self._by_request.get(engine_request_id)
        return push is None or not push.jobs

    def begin_step(self, saves: Iterable[Save]) -> None:
        self._saving = []
        for save in saves:
            push = self._by_request.get(save.engine_request_id)
            if push is not None:
                push.blocks += save.block_ids
                self._saving.append((push, save, len(push.blocks)))

    def layer_saved(self, layer: str, now: float) -> None:
        """All that the step computes of this layer is final."""
        for push, _, num_blocks in self._saving:
            push.final[layer] = num_blocks
            self._course.pump(push, now)

    def end_step(self, at: float, now: float) -> None:
        """All layers are final, by `at`."""
        saving, self._saving = self._saving, []
        for push, save, num_blocks in saving:
            push.final = dict.fromkeys(self._course.layers, num_blocks)
            if save.is_last:
                push.complete_at = at
            self._course.pump(push, now)

    def pushed(self, engine_request_id: str, now: float) -> None:
        """The engine has finished it; its blocks stay until the report."""
        self._report_unfollowed(engine_request_id, is_awaited=True)
        push = self._by_request.get(engine_request_id)
        if push is not None:
            push.is_awaited = push.is_left = True
            push.complete_at = now if push.complete_at is None else push.complete_at
            self._course.settle(push, now)

    def stop(self, stop: StopPush, now: float) -> None:
        """The prefill was aborted, or nobody wants it any more: reported once no call reads its blocks."""
        self._report_unfollowed(stop.engine_request_id, is_awaited=stop.is_reported)
        push = self._by_request.get(stop.engine_request_id)
        if push is not None:
            push.is_left = True
            push.is_awaited = push.is_awaited or stop.is_reported
            self._course.stop(push, Outcome.FAILED, stop.reason, now)
            self._course.settle(push, now)

    # What D says.

    def recv_ready(self, ready: RecvReady, reply: ReplyTo, now: float) -> None:
        if ready.consumer in self._cancelled_early.get(ready.key, ()):
            reply(_gone(ready, "the reader cancelled"))
            return
        push = self._pushes.get(ready.key) or self._new(ready.key, now)
        if push.state is PushState.ENDED and push.outcome is not Outcome.OK:
            reply(_gone(ready, push.reason))
        elif push.ready is not None and push.ready.consumer != ready.consumer:
            reply(_gone(ready, f"another reader has it: {push.ready.consumer}"))
        else:
            reply(RecvNoted(epoch=ready.epoch, transfer_id=ready.transfer_id, pair=ready.pair))
            if push.ready is None and push.state is PushState.AWAITING:
                self._course.ready(push, ready, now)

    def cancel(self, cancel: Cancel, reply: ReplyTo, now: float) -> None:
        """Answered when no call is under way any more."""

        def answer(is_drained: bool) -> None:
            reply(
                Cancelled(epoch=cancel.epoch, transfer_id=cancel.transfer_id, pair=cancel.pair, is_drained=is_drained)
            )

        push = self._pushes.get(cancel.key)
        if push is None:
            self._cancelled_early.setdefault(cancel.key, set()).add(cancel.consumer)
            self._tombstones.append((now + self._settings.kv_wait_s, cancel.key))
            answer(True)
        elif push.ready is not None and push.ready.consumer != cancel.consumer:
            answer(True)
        else:
            push.cancel_reply = reply
            self._course.stop(push, Outcome.CANCELLED, f"D cancelled: {cancel.reason}", now)
            if push.state is PushState.TELLING:
                self._course.asks.answered(push.key)
                push.fire(PushEvent.TOLD)
            if push.state is PushState.ENDED and push.cancel_reply is not None:
                push.cancel_reply = None
                answer(push.is_drained)
            self._course.settle(push, now)

    def on_answer(self, endpoint: str, answer: Answer, now: float) -> None:
        if isinstance(answer, Meta | Reject):
            peer = self._course.greetings.answered(endpoint, answer)
            for waiting in list(self._pushes.values()):
                if peer is not None and waiting.peer == peer and waiting.state is PushState.GREETING:
                    self._course.meet(waiting, now)
        elif isinstance(answer, Opened | Gone | PushAck):
            push = self._pushes.get(answer.key)
            if push is None or push.peer is None or push.peer.endpoint != endpoint:
                return
            if isinstance(answer, PushAck) and push.state is PushState.TELLING:
                self._course.told(push, now)
            elif isinstance(answer, Gone) and push.state is PushState.OPENING and not push.jobs:
                self._course.give_up(push, f"D says gone: {answer.reason}", now)
            elif isinstance(answer, Opened) and push.state is PushState.OPENING and not push.jobs:
                self._course.opened(push, answer, now)

    # What the writing thread says.

    def written(self, job_id: int, push_id: int, began: float, ended: float, now: float) -> None:
        self._by_push_id[push_id].add_time(began, ended)
        self.dropped(job_id, push_id, now)

    def dropped(self, job_id: int, push_id: int, now: float) -> None:
        push = self._by_push_id[push_id]
        push.jobs.discard(job_id)
        self._course.after_job(push, now)

    def broken(self, job_id: int, push_id: int, cause: str, is_stalled: bool, now: float) -> None:
        push = self._by_push_id[push_id]
        push.jobs.discard(job_id)
        push.is_drained = False
        if push.state is PushState.WRITING:
            if is_stalled or push.num_retries == _MAX_RETRIES:
                self._course.stop(push, Outcome.FAILED, f"write failed: {cause}", now)
            else:
                push.num_retries += 1
                push.broken_generation = push.generation
                push.queued.clear()  # what arrived before the failure may not have: all of it once more
                push.fire(PushEvent.BROKEN)
                self._course.actions.append(StopWrites(push_id=push_id))
        self._course.after_job(push, now)

    # Time.

    def tick(self, now: float) -> None:
        push: Outgoing | None
        for push in list(self._pushes.values()):
            if push.state not in OVER and (late := self._too_late(push, now)):
                self._course.stop(push, Outcome.FAILED, late, now)
                self._course.settle(push, now)
        greetings, silent_peers = self._course.greetings.due(now)
        asks, silent = self._course.asks.due(now)
        self._course.actions += [Send(endpoint=e, message=m) for e, m in (*greetings, *asks)]
        for key in silent:
            self._course.give_up(self._pushes[key], "D does not answer", now)
        for push in list(self._pushes.values()) if silent_peers else ():
            if push.peer in silent_peers and push.state is PushState.GREETING:
                self._course.give_up(push, "D does not answer", now)
        while self._tombstones and self._tombstones[0][0] <= now:
            _, key = self._tombstones.popleft()
            self._cancelled_early.pop(key, None)
            if (push := self._pushes.get(key)) is not None and push.is_settled:
                del self._pushes[key]
                del self._by_push_id[push.push_id]

    def next_at(self) -> float | None:
        times = [self._course.greetings.next_at(), self._course.asks.next_at()]
        return min((at for at in times if at is not None), default=None)

    def take_actions(self) -> list[PushAction]:
        actions, self._course.actions = self._course.actions, []
        return actions

    # How it is kept.

    def _new(self, key: TransferKey, now: float) -> Outgoing:
        push = Outgoing(push_id=next(self._ids), key=key, created_at=now)
        self._pushes[key] = self._by_push_id[push.push_id] = push
        return push

    def _report_unfollowed(self, engine_request_id: str, *, is_awaited: bool) -> None:
        """Its prefill has ended: nothing was written, nothing will be."""
        key = self._unfollowed.pop(engine_request_id, None)
        if key is not None and is_awaited:
            report = PushReport(
                engine_request_id=engine_request_id,
                key=key,
                peer="",
                outcome=Outcome.FAILED,
                reason=USED_TWICE,
                stats=TransferStats(num_bytes=0, num_descriptors=0, seconds=0.0),
            )
            self._course.actions.append(report)

    def _settled(self, push: Outgoing, now: float) -> None:
        """From here on a tombstone, for two leases."""
        if push.request is not None:
            self._by_request.pop(push.request.engine_request_id, None)
        self._tombstones.append((now + 2 * self._settings.kv_lease_s, push.key))

    def _too_late(self, push: Outgoing, now: float) -> str:
        settings = self._settings
        if push.request is None:
            over = now - push.created_at > settings.kv_wait_s
            return f"P did not begin this prefill within {settings.kv_wait_s:g} s" if over else ""
        if push.complete_at is None:
            return ""
        if push.ready is None:
            over = now - push.complete_at > settings.kv_hold_s
            return f"{NO_READER} within {settings.kv_hold_s:g} s" if over else ""
        over = now - max(push.complete_at, push.ready_at) > settings.kv_wait_s
        return f"not written within {settings.kv_wait_s:g} s after the prefill" if over else ""


def _gone(message: RecvReady, reason: str) -> Gone:
    return Gone(epoch=message.epoch, transfer_id=message.transfer_id, pair=message.pair, reason=reason)
