"""What the connector inside an engine is told of a request."""

from __future__ import annotations

from connector.params import PullConsumer, PullProducer, PushConsumer, PushProducer, params_of
from engine.base import EngineRequest, LoadKv, PrefillOnly, PushKv, ReceiveKv


def kv_params(request: EngineRequest) -> dict[str, object] | None:
    """None: nothing comes from or goes to another engine."""
    match request.kv:
        case PrefillOnly():
            return params_of(PullProducer(transfer_id=request.request_id, pair=request.pair))
        case PushKv():
            return params_of(PushProducer(transfer_id=request.request_id, pair=request.pair))
        case LoadKv(ticket=ticket):
            return params_of(PullConsumer(ticket=ticket))
        case ReceiveKv(source=source):
            return params_of(PushConsumer(transfer_id=request.request_id, pair=request.pair, source=source))
        case None:
            return None
