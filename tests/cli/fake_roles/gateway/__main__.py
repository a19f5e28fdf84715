"""A stand-in for `python -m gateway`: answers /ready, streams one fixed chat answer, notes when it is asked to stop."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
from pathlib import Path

ANSWER = ["Par", "is", " [it] is.\n"]
TRACE = {
    "mode": "pull",
    "prefill_worker": "prefill-a",
    "decode_worker": "decode-b",
    "queue_wait_ms": 1.25,
    "prefill_ms": 33.0,
    "ttft_ms": 51.5,
    "kv_bytes": 2_000_000,
    "kv_descriptors": 3,
    "kv_ms": 2.0,
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][0]["content"]
        if question == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "no such model"}}).encode())
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": keep-alive\n\n")
        for text in ANSWER:
            self.event({"choices": [{"delta": {"content": text}}]})
        if question == "fail":
            self.event({"error": {"message": "worker lost"}})
        usage = {"prompt_tokens": 12, "completion_tokens": 5}
        self.event({"choices": [], "usage": usage, "pdq": TRACE if self.headers.get("x-pdq-trace") == "1" else {}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: object) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def note_stop(*_: object) -> None:
    with Path("stops.txt").open("a") as file:
        file.write("gateway\n")
    os._exit(0)


signal.signal(signal.SIGTERM, note_stop)
print(sys.argv[1:], flush=True)
port = int(sys.argv[sys.argv.index("--http-port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
