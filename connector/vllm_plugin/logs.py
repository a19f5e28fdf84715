"""The connector's log lines inside vLLM's processes."""

from __future__ import annotations

import logging

import structlog


def log_through_vllm() -> None:
    """As lines of vLLM's own logger, at its level; unless the process has set structlog up itself."""
    if structlog.is_configured():
        return
    logger = logging.getLogger("vllm.pdq")
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logger.getEffectiveLevel()),
        logger_factory=lambda *_: logger,
        cache_logger_on_first_use=False,
    )
