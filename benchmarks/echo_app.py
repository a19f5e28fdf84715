"""The floor that the gateway is measured against: the same framework and server, echoing one event. No pdq in it."""

from __future__ import annotations

import json
import sys

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

app = FastAPI()


@app.post("/v1/completions", response_model=None)
async def echo(request: Request) -> Response:
    body = json.loads(await request.body())
    chunk = {"choices": [{"text": body["prompt"][:16]}]}
    if not body.get("stream"):
        return Response(json.dumps(chunk), media_type="application/json")

    async def events():
        yield f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@app.get("/ready")
async def ready() -> dict[str, str]:
    return {"status": "ready"}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
