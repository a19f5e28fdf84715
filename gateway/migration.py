"""A request moves on to its next gen: says and counts why, and whether the client can tell."""

from __future__ import annotations

from typing import Final

import structlog

from gateway.exchange import Exchange
from gateway.metrics import GatewayMetrics

_KV_NEVER_CAME: Final = "kv_transfer_failed"
log = structlog.get_logger(__name__)


def note_migration(exchange: Exchange, reason: str, metrics: GatewayMetrics) -> None:
    exchange.failed_prefills += reason == _KV_NEVER_CAME  # the prompt itself may be what kills prefill workers
    resume = resume_kind(exchange)
    metrics.migrations.labels(reason, resume).inc()
    log.warning(
        "request_migrated",
        request_id=exchange.request_id,
        gen=exchange.session.gen,
        reason=reason,
        resume=resume,
        num_tokens=len(exchange.session.accepted),
    )


def resume_kind(exchange: Exchange) -> str:
    """`fresh`: no token was delivered. `approximate`: a random state or penalties go on from the delivered tokens."""
    if not exchange.session.accepted:
        return "fresh"
    sampling = exchange.prompt.sampling
    has_penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    has_seed = sampling.seed is not None and not sampling.is_greedy
    return "approximate" if has_penalties or has_seed else "exact"
