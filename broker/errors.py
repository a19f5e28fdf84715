"""Error family of the queue side. `code` is stable; only the gateway's OpenAI module maps codes to HTTP."""

from __future__ import annotations

from typing import ClassVar, Final


class PipelineError(Exception):
    """Something in the pipeline went wrong."""

    code: ClassVar[str] = "pipeline_error"


class QueueUnavailable(PipelineError):
    """The queue's store can't be reached or refuses writes."""

    code = "queue_unavailable"


class QueueMisconfigured(QueueUnavailable):
    """The queue's store is reachable, but must not be used as it is set up: at start-up a reason to exit."""

    code = "queue_misconfigured"


class DoesNotFit(PipelineError):
    """This process and the others of its model don't go together: at start-up a reason to exit."""

    code = "does_not_fit"


CANNOT_START: Final = (QueueMisconfigured, DoesNotFit)
"""Bad settings or a bad store, not faults: the process exits with 2."""


class PeerUnavailable(PipelineError):
    """A peer process gave no answer in time."""

    code = "peer_unavailable"
