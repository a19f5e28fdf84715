"""The FastAPI application: routes, their documentation, and errors in OpenAI's shape on every path."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import Api, error_response
from gateway.errors import GatewayError
from gateway.metrics import GatewayMetrics
from gateway.openai_schema import ChatRequest, CompletionRequest

_OPEN_PATHS: Final = frozenset({"/health", "/ready"})
log = structlog.get_logger(__name__)


def create_app(api: Api, *, metrics: GatewayMetrics, reasons: Callable[[], list[str]], api_key: str = "") -> ASGIApp:
    """`reasons`: why no request can be served now (empty: ready)."""
    app = FastAPI(
        title="pdq gateway", description="OpenAI API over separate prefill and decode workers.", redoc_url=None
    )
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    _add_openai(app, api)

    @app.get("/v1/models", tags=["openai"])
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [api.model_card()]})

    @app.get("/v1/models/{model:path}", tags=["openai"])
    async def model(model: str) -> Response:
        if model != api.model:
            message = f"The model {model[:200]!r} does not exist; this server has {api.model!r}."
            return error_response(GatewayError("model_not_found", message, param="model"), [])
        return JSONResponse(api.model_card())

    @app.get("/health", tags=["operations"])
    async def health() -> JSONResponse:
        """200 while this process runs; says nothing about the workers."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", tags=["operations"])
    async def ready() -> JSONResponse:
        """200 when a request can be served now, else 503 with the reasons."""
        why_not = reasons()
        if not why_not:
            return JSONResponse({"status": "ready"})
        headers = {"retry-after": "2"}
        return JSONResponse({"status": "not_ready", "reasons": why_not}, status_code=503, headers=headers)

    @app.get("/metrics", tags=["operations"])
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return _KeyGuard(app, api_key) if api_key else app


def _add_openai(app: FastAPI, api: Api) -> None:
    """The bodies are parsed by `parsing.py`, once; FastAPI only documents them."""
    for path, endpoint, model in (
        ("/v1/chat/completions", api.chat, ChatRequest),
        ("/v1/completions", api.completion, CompletionRequest),
    ):
        app.add_api_route(
            path,
            _raw(endpoint),
            methods=["POST"],
            tags=["openai"],
            name=path.removeprefix("/v1/"),
            response_class=Response,
            openapi_extra=_body_of(model),
        )


def _raw(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """FastAPI wants a function whose parameter is annotated with the request's class itself."""

    async def call(request: Request) -> Response:
        return await endpoint(request)

    call.__annotations__ = {"request": Request, "return": Response}
    return call


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    text = json.dumps(schema)
    for name, definition in definitions.items():  # OpenAPI has no $defs inside a body: put them in place
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(definition))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json.loads(text)}}}}


class _KeyGuard:
    """Every path but health and readiness needs the key; compared in constant time, never logged."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = GatewayError("invalid_api_key", "the API key is missing or wrong")
                await error_response(error, [(b"www-authenticate", b"Bearer")])(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        method = GatewayError("method_not_allowed", f"{request.method} is not allowed for {request.url.path[:200]}")
        allowed = (error.headers or {}).get("Allow", "")
        return error_response(method, [(b"allow", allowed.encode())])
    return error_response(GatewayError("not_found", f"there is no {request.url.path[:200]}"), [])


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request_crashed", path=request.url.path[:200], exc_info=error)
    return error_response(GatewayError("internal_error", "the gateway failed; its log says why"), [])
