"""Steps that the worker is too busy to take: joined, so that it gets one message for them instead of many. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from engine.base import EngineOutput, EngineStats, StepOutputs


class HeldSteps:
    """Steps are added in order, and taken all at once as one."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[EngineOutput]] = {}
        self._released: list[str] = []
        self._stats: EngineStats | None = None
        self.num_steps = 0
        """Added since the last `take`."""

    def add(self, step: StepOutputs) -> None:
        for output in step.outputs:
            self._outputs.setdefault(output.engine_request_id, []).append(output)
        self._released += step.released
        self._stats = step.stats
        self.num_steps += 1

    def take(self) -> StepOutputs:
        """There must be one."""
        assert self._stats is not None
        step = StepOutputs(
            outputs=tuple([joined(outputs) for outputs in self._outputs.values()]),
            released=tuple(self._released),
            stats=self._stats,
        )
        self._outputs, self._released, self._stats, self.num_steps = {}, [], None, 0
        return step


def joined(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """One output that says what these say one after the other. Not for nothing at all."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return EngineOutput(
        engine_request_id=last.engine_request_id,
        token_ids=b"".join([output.token_ids for output in outputs]),
        logprobs=tuple(logprobs) if logprobs else None,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        finish=last.finish,
        stop_token_id=last.stop_token_id,
        error=last.error,
        ticket=last.ticket,
        cached_tokens=last.cached_tokens,
        transfer=last.transfer,
    )
