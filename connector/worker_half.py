"""The half beside the KV memory: registers regions, answers readers, reads blocks, reports ids exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connector.layout import KvRegion
from connector.settings import ConnectorSettings
from connector.step import StepMeta, TransferResults
from connector.transport import Transport


class WorkerHalf:
    """Driven by the model's thread, in vLLM's order. No method waits for the network, except start and shutdown."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        engine_id: str,
        epoch: str,
        host: str,
        side_channel_port: int,
        rank: int,
        tp_size: int,
        transport: Transport,
        fingerprint: str,
        on_progress: Callable[[], None],
    ) -> None:
        """Binds the side channel on `side_channel_port + rank` (0: any free port, see `port`).

        `on_progress` is called from the IO thread when results wait, so that an idle engine loop wakes.
        """
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The side-channel port of this rank, known once constructed."""
        raise NotImplementedError

    def register_kv_caches(self, regions: Sequence[KvRegion]) -> None:
        """Starts transport and threads. Once. Raises TransportError, LayoutError."""
        raise NotImplementedError

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Nothing in pull: only finished prefills are read."""

    def bind_connector_metadata(self, meta: StepMeta) -> None:
        """Hands the step's metadata to the IO thread."""
        raise NotImplementedError

    def start_load_kv(self) -> None:
        """Starts the loads of the bound metadata; may come before or after the forward."""
        raise NotImplementedError

    def wait_for_layer_load(self, layer: str) -> None:
        """Nothing: loads are asynchronous, a request runs only after its load was reported."""

    def save_kv_layer(self, layer: str) -> None:
        """Nothing in pull."""

    def wait_for_save(self) -> None:
        """Nothing in pull."""

    def clear_connector_metadata(self) -> None:
        """Ends the step."""
        raise NotImplementedError

    def get_transfer_results(self) -> TransferResults:
        """What ended since the last call; each id exactly once."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Ends readers' claims, closes sockets, threads and the transport. Idempotent."""
        raise NotImplementedError
