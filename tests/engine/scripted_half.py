"""Stand-in for both connector halves: the test decides when transfers end. Checks the calls' order and number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from connector.params import PullConsumer, PullProducer, params_from_ticket, parse
from connector.step import Scheduled, StepMeta, TransferResults
from pdq.wire.types import KvTicket, Pair, pack_ids

BLOCK_SIZE = 4


def ticket(name: str, num_tokens: int) -> KvTicket:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return KvTicket(
        transfer_id=name,
        pair=Pair(gen=1, attempt=1),
        engine_id="p",
        epoch="e",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        block_size=BLOCK_SIZE,
        num_tokens=num_tokens,
        block_ids=pack_ids(range(num_blocks)),
    )


@dataclass(slots=True)
class ScriptedHalf:
    wanted: set[str] = field(default_factory=set)
    """Consumers that haven't loaded yet."""
    undecided: set[str] = field(default_factory=set)
    """Consumers about which nothing is known yet."""
    loading: dict[str, list[int]] = field(default_factory=dict)
    awaiting_second_call: set[str] = field(default_factory=set)
    pinned: dict[str, list[int]] = field(default_factory=dict)
    producers: set[str] = field(default_factory=set)
    gone: dict[str, str] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    def on_new_request(self, engine_request_id: str, kv_params: Mapping[str, object] | None, num_tokens: int) -> None:
        assert engine_request_id not in self.known
        self.known.add(engine_request_id)
        match parse(kv_params):
            case PullProducer():
                self.producers.add(engine_request_id)
            case PullConsumer(ticket=found):
                assert found.num_tokens == num_tokens
                self.wanted.add(engine_request_id)

    def get_num_new_matched_tokens(
        self, engine_request_id: str, num_tokens: int, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert engine_request_id in self.known
        if engine_request_id in self.undecided:
            return None, False
        if engine_request_id not in self.wanted:
            return 0, False
        return num_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, engine_request_id: str, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.calls.append(f"alloc {engine_request_id} {num_external_tokens}")
        if num_external_tokens:
            self.wanted.remove(engine_request_id)
            self.loading[engine_request_id] = list(block_ids)
        self.awaiting_second_call.discard(engine_request_id)

    def build_connector_meta(self, scheduled: Iterable[Scheduled] = (), preempted: Iterable[str] = ()) -> StepMeta:
        return StepMeta()

    def request_finished(
        self, engine_request_id: str, block_ids: Sequence[int], finish: str
    ) -> tuple[bool, dict[str, object] | None]:
        self.known.remove(engine_request_id)  # exactly once
        self.wanted.discard(engine_request_id)
        self.awaiting_second_call.discard(engine_request_id)
        if finish == "prefilled" and engine_request_id in self.producers:
            self.pinned[engine_request_id] = list(block_ids)
            return True, params_from_ticket(ticket("t", len(block_ids) * BLOCK_SIZE))
        return False, None

    def release(self, engine_request_id: str) -> None:
        assert engine_request_id in self.pinned
        self.calls.append(f"release {engine_request_id}")

    def update_connector_output(self, results: TransferResults) -> TransferResults:
        return results

    def take_gone(self) -> dict[str, str]:
        gone, self.gone = self.gone, {}
        return gone

    def has_pending_meta(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass

    def loaded(self, *ids: str, failed: Mapping[str, str] | None = None) -> TransferResults:
        """These loads have ended."""
        failed = dict(failed or {})
        for engine_request_id in [*ids, *failed]:
            del self.loading[engine_request_id]
            if engine_request_id in self.known and engine_request_id not in failed:
                self.awaiting_second_call.add(engine_request_id)
        return TransferResults(finished_recving=frozenset([*ids, *failed]), failed_recving=failed)

    def sent(self, *ids: str) -> TransferResults:
        """Nobody needs the blocks of these any more."""
        for engine_request_id in ids:
            del self.pinned[engine_request_id]
        return TransferResults(finished_sending=frozenset(ids))
