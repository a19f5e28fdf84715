"""The OpenAI endpoints: parse, check, tokenise, enqueue; then hand over to the answer's writer.

Whatever can be refused is refused before anything is queued.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Literal

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from broker.membership import RegistryView
from gateway.answer import Answer, Label, Part
from gateway.capabilities import check_capabilities
from gateway.choice import Choice
from gateway.context_limit import ContextLimit
from gateway.errors import GatewayError, error_json, headers_of
from gateway.event_stream import EventStream
from gateway.exchange import Bell, Exchange
from gateway.http_fields import client_request_id, read_body, tenant, timeout_s, traceparent, wants_trace
from gateway.hub import Hub
from gateway.json_answer import JsonAnswer
from gateway.metrics import GatewayMetrics
from gateway.output_format import FormatChecks
from gateway.parsing import Ask, parse_chat, parse_completion
from gateway.prepare import Prompt, prepare
from gateway.session import Session
from gateway.settings import GatewaySettings
from gateway.tokenizer import TextTokenizer
from pdq.wire.types import pack_ids

log = structlog.get_logger(__name__)
_ID_PREFIX = {"chat": "chatcmpl-", "text": "cmpl-"}


class Api:
    def __init__(
        self,
        settings: GatewaySettings,
        *,
        model: str,
        view: RegistryView,
        context_limit: ContextLimit,
        tokenizer: TextTokenizer,
        hub: Hub,
        metrics: GatewayMetrics,
    ) -> None:
        self.model = model
        self._view = view
        self._formats = FormatChecks()
        self._context_limit = context_limit
        self.started_at = int(time.time())
        self._settings = settings
        self._tokenizer = tokenizer
        self._hub = hub
        self._metrics = metrics

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, "chat")

    async def completion(self, request: Request) -> Response:
        return await self._serve(request, "text")

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.started_at,
            "owned_by": "pdq",
            "max_model_len": self._context_limit(),
        }

    async def _serve(self, request: Request, kind: Literal["chat", "text"]) -> Response:
        received_at = asyncio.get_running_loop().time()
        request_id = uuid.uuid4().hex
        echoed_id = client_request_id(request, request_id)
        headers = [(b"x-request-id", echoed_id.encode())]
        endpoint = "chat" if kind == "chat" else "completions"
        try:
            ask = self._parse(kind, await read_body(request, self._settings.max_body_bytes))
            check_capabilities(ask.sampling, self._view, field=ask.format_field)
            if ask.sampling.output_format is not None:
                await self._formats.check(ask.sampling.output_format, field=ask.format_field)
            deadline = received_at + timeout_s(request, ask.timeout_s, self._settings.request_deadline_s)
            prompts = await prepare(ask, self._tokenizer, self._context_limit())
            self._hub.check_room(len(prompts))
            label = Label(
                request_id=request_id,
                answer_id=_ID_PREFIX[kind] + request_id,
                created=int(time.time()),
                model=self.model,
                client_request_id=echoed_id,
                has_trace=wants_trace(request),
            )
            bell = Bell()
            parts = [
                self._part(request, ask, prompt, index, request_id, bell, received_at, deadline)
                for index, prompt in enumerate(prompts)
            ]
            for part in parts:
                self._hub.open(part.exchange)
        except GatewayError as error:
            self._metrics.count(endpoint, "refused", error.error_code)
            log.info("request_refused", request_id=request_id, client_request_id=echoed_id, code=error.error_code)
            return error_response(error, headers)
        except ClientDisconnect:
            self._metrics.count(endpoint, "cancelled")
            return Response(status_code=400)  # nobody reads it
        answer = Answer(
            ask,
            label,
            parts,
            bell=bell,
            hub=self._hub,
            tokenizer=self._tokenizer,
            metrics=self._metrics,
            received_at=received_at,
        )
        if not ask.stream:
            return JsonAnswer(answer, headers)
        settings = self._settings
        return EventStream(
            answer, headers, first_event_s=settings.sse_first_event_s, keepalive_s=settings.sse_keepalive_s
        )

    def _parse(self, kind: Literal["chat", "text"], body: bytes) -> Ask:
        ask = (
            parse_chat(body) if kind == "chat" else parse_completion(body, max_prompts=self._settings.max_list_prompts)
        )
        if ask.model != self.model:
            message = f"The model {ask.model[:200]!r} does not exist; this server has {self.model!r}."
            raise GatewayError("model_not_found", message, param="model")
        return ask

    def _part(
        self,
        request: Request,
        ask: Ask,
        prompt: Prompt,
        index: int,
        request_id: str,
        bell: Bell,
        received_at: float,
        deadline: float,
    ) -> Part:
        exchange = Exchange(
            session=Session(
                request_id=request_id if index == 0 else uuid.uuid4().hex,
                max_tokens=prompt.sampling.max_tokens,
                deadline=deadline,
                max_migrations=self._settings.max_migrations,
                is_resumable=prompt.sampling.output_format is None,
            ),
            prompt=prompt,
            prompt_ids=pack_ids(prompt.token_ids),
            bell=bell,
            is_impatient=ask.stream or bool(ask.stops),
            priority=ask.priority,
            tenant=tenant(request),
            traceparent=traceparent(request),
            received_at=received_at,
        )
        decoder = self._tokenizer.decoder(
            skip_special_tokens=ask.skip_special_tokens, context=[] if ask.kind == "chat" else prompt.token_ids
        )
        choice = Choice(
            decoder,
            stops=ask.stops,
            include_stop=ask.include_stop,
            min_tokens=ask.sampling.min_tokens,
            wants_logprobs=ask.logprobs,
            is_muted=ask.max_tokens == 0,
        )
        return Part(index=index, exchange=exchange, choice=choice)


def error_response(error: GatewayError, headers: list[tuple[bytes, bytes]]) -> Response:
    response = Response(error_json(error.error_code, error.message, error.param), status_code=error.status)
    response.raw_headers += [*headers_of(error.status), *headers]
    return response
