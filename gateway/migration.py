"""A request moves on to its next gen: says and counts why, and whether the client can tell."""

from __future__ import annotations

from typing import Final

import structlog

from broker.membership import RegistryView
from gateway.capabilities import can_resume_exactly
from gateway.exchange import Exchange
from gateway.metrics import GatewayMetrics

_KV_NEVER_CAME: Final = "kv_transfer_failed"
log = structlog.get_logger(__name__)


def note_migration(exchange: Exchange, reason: str, metrics: GatewayMetrics, view: RegistryView) -> None:
    exchange.failed_prefills += reason == _KV_NEVER_CAME  # the prompt itself may be what kills prefill workers
    resume = resume_kind(exchange, is_exact=can_resume_exactly(view))
    metrics.migrations.labels(reason, resume).inc()
    log.warning(
        "request_migrated",
        request_id=exchange.request_id,
        gen=exchange.session.gen,
        reason=reason,
        resume=resume,
        num_tokens=len(exchange.session.accepted),
    )


def resume_kind(exchange: Exchange, *, is_exact: bool) -> str:
    """`fresh`: no token was delivered. `exact`: the client gets what it would have got.

    `approximate`: a random state or penalties go on from the delivered tokens (vLLM counts penalties over its own
    output and starts a seed anew), or the engines round otherwise when they compute tokens again (not `is_exact`).
    """
    if not exchange.session.accepted:
        return "fresh"
    sampling = exchange.prompt.sampling
    has_penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
    has_seed = sampling.seed is not None and not sampling.is_greedy
    return "exact" if is_exact and not has_penalties and not has_seed else "approximate"
