"""The answer as one JSON document, once all of it is known: until then a failure still has its real status code."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answer import Answer, Part
from gateway.disconnect import watching
from gateway.errors import GatewayError, error_json, headers_of


class JsonAnswer(Response):
    """An ASGI response of its own: Starlette's would need the whole body at once."""

    def __init__(self, answer: Answer, headers: list[tuple[bytes, bytes]]) -> None:
        self.status_code = 200
        self.background = None
        self._answer = answer
        self._own_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        async with watching(receive, answer):
            try:
                status, body = 200, await self._body()
            except GatewayError as error:
                answer.cancel()
                status, body = error.status, error_json(error.error_code, error.message, error.param)
                answer.tell("cancelled" if answer.is_client_gone else "error", error.error_code)
            if answer.is_client_gone:
                return
            headers = [(b"content-type", b"application/json")] if status == 200 else headers_of(status)
            headers += [(b"content-length", str(len(body)).encode()), *self._own_headers]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            answer.tell("ok")

    async def _body(self) -> bytes:
        """Raises GatewayError when a prompt failed."""
        answer = self._answer
        texts: list[list[str]] = [[] for _ in answer.parts]
        while not answer.is_finished:
            await answer.bell.wait()
            if answer.failure is not None:
                raise answer.failure
            for part in answer.parts:
                if part.choice.finish_reason is not None:
                    continue
                texts[part.index] += answer.read(part)
                if part.exchange.end is not None:
                    texts[part.index].append(answer.close(part))
        return self._document(["".join(pieces) for pieces in texts])

    def _document(self, texts: list[str]) -> bytes:
        answer, label = self._answer, self._answer.label
        is_chat = answer.ask.kind == "chat"
        document: dict[str, Any] = {
            "id": label.answer_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": label.created,
            "model": label.model,
            "choices": [self._choice(part, text) for part, text in zip(answer.parts, texts, strict=True)],
            "usage": answer.usage(),
        }
        if is_chat and answer.ask.prompt_logprobs:
            document["prompt_logprobs"] = answer.prompt_logprobs(answer.parts[0])
        if is_chat and answer.ask.return_token_ids:
            document["prompt_token_ids"] = answer.parts[0].exchange.prompt.token_ids
        if label.has_trace:
            document["pdq"] = answer.trace()
        return json.dumps(document, separators=(",", ":")).encode()

    def _choice(self, part: Part, text: str) -> dict[str, Any]:
        answer, ask, choice = self._answer, self._answer.ask, part.choice
        document: dict[str, Any] = {"index": part.index}
        if ask.kind == "chat":
            document |= {"message": {"role": "assistant", "content": text}, "logprobs": answer.logprobs(part)}
        else:
            document |= self._completion(part, text)
            if ask.prompt_logprobs:
                document["prompt_logprobs"] = answer.prompt_logprobs(part)
            if ask.return_token_ids:
                document["prompt_token_ids"] = part.exchange.prompt.token_ids
        document |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if ask.return_token_ids:
            document["token_ids"] = choice.token_ids
        return document

    def _completion(self, part: Part, text: str) -> dict[str, Any]:
        answer, ask = self._answer, self._answer.ask
        if not ask.echo:
            return {"text": text, "logprobs": answer.logprobs(part)}
        text = answer.echo_text(part) + text
        if not ask.logprobs:
            return {"text": text, "logprobs": None}
        return {
            "text": text,
            "logprobs": answer.echo_logprobs([*answer.echo_entries(part), *part.choice.take_logprobs()]),
        }
