"""The answer as server-sent events: one write per wake-up, however many events came since.

Headers wait for the first event (or `sse_first_event_s`), so that a failure before it has its real status code. A later
failure is an error event; every stream ends with `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer, Part
from gateway.chunks import DONE, KEEP_ALIVE, ChatChunks, ChunkWriter, CompletionChunks, event
from gateway.disconnect import watching
from gateway.errors import GatewayError, error_json, error_object, headers_of


class EventStream(Response):
    def __init__(
        self, answer: Answer, headers: list[tuple[bytes, bytes]], *, first_event_s: float, keepalive_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self._answer = answer
        self._own_headers = headers
        self._first_event_s = first_event_s
        self._keepalive_s = keepalive_s
        self._has_begun: set[int] = set()
        ask, label = answer.ask, answer.label
        writer = ChatChunks if ask.kind == "chat" else CompletionChunks
        self._chunks: ChunkWriter = writer(
            answer_id=label.answer_id, created=label.created, model=label.model, has_usage=ask.include_usage
        )
        self._is_rich = ask.logprobs or ask.return_token_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watching(receive, self._answer):
            await self._run(send)

    async def _run(self, send: Send) -> None:
        answer, bell, loop = self._answer, self._answer.bell, asyncio.get_running_loop()
        due = bell.alarm_at = loop.time() + self._first_event_s
        is_started = False
        while True:
            await bell.wait()
            if answer.is_client_gone:
                return
            events: list[bytes] = []
            failure = self._read(events)
            if not is_started:
                if failure is not None:
                    await self._refuse(send, failure)
                    return
                if not events and loop.time() < due:
                    continue
                await send({"type": "http.response.start", "status": 200, "headers": self._start_headers()})
                is_started = True
            is_over = failure is not None or answer.is_finished
            if failure is not None:
                answer.cancel()
                events += [event(error_object(failure.error_code, failure.message)), DONE]
            elif is_over:
                events += self._last()
            elif not events:
                if loop.time() < due:
                    continue  # tokens came, but no complete character
                events = [KEEP_ALIVE]
            due = bell.alarm_at = loop.time() + self._keepalive_s
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": not is_over})
            if is_over:
                answer.tell("ok" if failure is None else "error", "" if failure is None else failure.error_code)
                return

    def _read(self, events: list[bytes]) -> GatewayError | None:
        """Adds what came to `events`. The failure, if there is one: events read before it are still right."""
        answer = self._answer
        try:
            for part in answer.parts:
                if part.choice.finish_reason is not None:
                    continue
                for text in answer.read(part):
                    self._begin(part, events)
                    events.append(self._text(part, text))
                if part.exchange.end is not None and answer.failure is None:
                    self._begin(part, events)
                    events.append(self._finish(part))
        except GatewayError as error:
            return error
        return answer.failure

    def _begin(self, part: Part, events: list[bytes]) -> None:
        if part.index in self._has_begun:
            return
        self._has_begun.add(part.index)
        events.append(self._chunks.opening(part.index))
        answer, ask = self._answer, self._answer.ask
        fields: dict[str, Any] = {}
        if ask.return_token_ids:
            fields["prompt_token_ids"] = part.exchange.prompt.token_ids
        if ask.echo and ask.logprobs:
            fields["logprobs"] = answer.echo_logprobs(answer.echo_entries(part))
        if ask.echo or fields:
            text = answer.echo_text(part) if ask.echo else ""
            part.choice.num_logprob_chars += len(text)
            events.append(self._chunks.rich(part.index, text, **fields))

    def _text(self, part: Part, text: str) -> bytes:
        if not self._is_rich:
            return self._chunks.text(part.index, text)
        return self._chunks.rich(part.index, text, **self._fields(part))

    def _finish(self, part: Part) -> bytes:
        text = self._answer.close(part)
        return self._chunks.finish(part.index, part.choice, text, **self._fields(part))

    def _fields(self, part: Part) -> dict[str, Any]:
        """What belongs to the tokens since the last event."""
        fields: dict[str, Any] = {}
        if self._answer.ask.logprobs and part.choice.has_logprobs:
            fields["logprobs"] = self._answer.logprobs(part)
        if self._answer.ask.return_token_ids:
            fields["token_ids"] = part.choice.take_token_ids()
        return fields

    def _last(self) -> list[bytes]:
        answer = self._answer
        trace = {"pdq": answer.trace()} if answer.label.has_trace else {}
        if answer.ask.include_usage or trace:
            return [self._chunks.usage(answer.usage(), **trace), DONE]
        return [DONE]

    async def _refuse(self, send: Send, failure: GatewayError) -> None:
        self._answer.cancel()
        body = error_json(failure.error_code, failure.message, failure.param)
        headers = [*headers_of(failure.status), (b"content-length", str(len(body)).encode()), *self._own_headers]
        await send({"type": "http.response.start", "status": failure.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self._answer.tell("error", failure.error_code)

    def _start_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._own_headers,
        ]
