"""What a client is told: stable code -> (HTTP status, OpenAI error type). The only place that maps codes to HTTP.

Codes come from here, from broker.errors, from Failed notices of workers, and from dead letters.
"""

from __future__ import annotations

import json
from typing import Final

from broker.errors import PipelineError

_REQUEST: Final = "invalid_request_error"
_SERVER: Final = "server_error"

HTTP_STATUS: Final[dict[str, tuple[int, str]]] = {
    # The request is wrong; nothing was queued.
    "invalid_json": (400, _REQUEST),
    "invalid_value": (400, _REQUEST),
    "invalid_output_format": (400, _REQUEST),
    "unsupported": (400, _REQUEST),
    "unsupported_content_type": (400, _REQUEST),
    "context_length_exceeded": (400, _REQUEST),
    "prompt_too_long": (400, _REQUEST),
    "invalid_api_key": (401, "authentication_error"),
    "model_not_found": (404, _REQUEST),
    "not_found": (404, _REQUEST),
    "method_not_allowed": (405, _REQUEST),
    "body_too_large": (413, _REQUEST),
    # We can't take it now; nothing was queued.
    "overloaded": (429, "rate_limit_error"),
    "queue_unavailable": (503, "service_unavailable_error"),
    "shutting_down": (503, "service_unavailable_error"),
    # It was taken and not finished.
    "client_disconnected": (499, "client_error"),
    "deadline_exceeded": (504, "timeout_error"),
    "decode_worker_lost": (502, _SERVER),
    "admit_conflict": (502, _SERVER),
    "request_forgotten": (502, _SERVER),
    "engine_stalled": (502, _SERVER),
    "job_ended": (502, _SERVER),
    "delta_gap": (502, _SERVER),
    "delta_mismatch": (502, _SERVER),
    "answer_cut_short": (502, _SERVER),
    "engine_error": (502, _SERVER),
    "kv_transfer_failed": (502, _SERVER),
    "max_attempts": (502, _SERVER),
    "orphaned": (502, _SERVER),
    "payload_lost": (502, _SERVER),
    "payload_invalid": (502, _SERVER),
    "prompt_logprobs_missing": (502, _SERVER),
    "internal_error": (500, _SERVER),
}
RETRY_AFTER_S: Final = {429: 1, 503: 2}


class GatewayError(PipelineError):
    """A request that ends with an error object. `param` names the request field at fault."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.error_code = code
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        return status_of(self.error_code)


def status_of(code: str) -> int:
    """HTTP status; a code that only a newer worker knows is a 502: the fault is behind the gateway."""
    return HTTP_STATUS.get(code, (502, _SERVER))[0]


def error_object(code: str, message: str, param: str | None = None) -> dict[str, dict[str, str | None]]:
    """The body of an error answer and of an error event in a stream, in OpenAI's shape."""
    kind = HTTP_STATUS.get(code, (502, _SERVER))[1]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_json(code: str, message: str, param: str | None = None) -> bytes:
    """As one line: json.dumps escapes every line break."""
    return json.dumps(error_object(code, message, param)).encode()


def headers_of(status: int) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error status."""
    headers = [(b"content-type", b"application/json")]
    if status in RETRY_AFTER_S:
        headers.append((b"retry-after", str(RETRY_AFTER_S[status]).encode()))
    return headers
