"""The half beside the KV memory: registers regions, answers readers, reads blocks, reports ids exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from connector.io_thread import IoThread, Quiet
from connector.layout import KvRegion, check_regions, storages
from connector.push_exchange import LayerSaved, StepSaved
from connector.results import Results
from connector.settings import ConnectorSettings
from connector.side_channel import Hello, codec
from connector.step import StepMeta, TransferResults
from connector.transport import Transport
from pdq.wire.blocking import BlockingInbox

log = structlog.get_logger(__name__)


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
        num_kv_heads: int = 0,
    ) -> None:
        """Binds the side channel on `side_channel_port + rank` (0: any free port, see `port`). Raises OSError.

        `on_progress` is called from the IO thread when results wait, so that an idle engine loop wakes.
        `num_kv_heads`: of the whole model, over all ranks, 1 for MLA. 0: not known, all peers must have the same TP.
        Raises ValueError when there are more ranks than one and no port, since peers look for rank r at port + r.
        """
        if tp_size > 1 and not side_channel_port:
            raise ValueError(f"side_channel_port is 0: with TP {tp_size} it must be given, rank r listens on it + r")
        self._settings = settings
        self._host = host
        self._transport = transport
        self._engine_id = engine_id
        self._hello = Hello(
            epoch="",
            consumer=epoch,
            rank=rank,
            tp_size=tp_size,
            fingerprint=fingerprint,
            num_kv_heads=num_kv_heads,
        )
        self._on_progress = on_progress
        self._results = Results()
        self._inbox = BlockingInbox(codec(), host=host, port=side_channel_port + rank if side_channel_port else 0)
        self._io: IoThread | None = None
        self._bound = StepMeta()

    @property
    def port(self) -> int:
        """The side-channel port of this rank, known once constructed."""
        return int(self._inbox.endpoint.rpartition(":")[2])

    def register_kv_caches(self, regions: Sequence[KvRegion]) -> None:
        """Starts transport and threads. Once. Raises TransportError, LayoutError."""
        assert self._io is None, "register_kv_caches is called once"
        check_regions(regions)
        self._transport.start(self._host)
        memory = storages(regions)
        for address, num_bytes in memory:
            self._transport.register(address, num_bytes)
        self._io = IoThread(
            self._settings,
            inbox=self._inbox,
            transport=self._transport,
            regions=regions,
            hello=self._hello,
            results=self._results,
            on_progress=self._on_progress,
        )
        self._io.start()
        log.info(
            "kv_registered",
            engine_id=self._engine_id,
            rank=self._hello.rank,
            side_channel=self._inbox.endpoint,
            transport=self._transport.address,
            num_regions=len(regions),
            num_storages=len(memory),
            num_bytes=sum(num_bytes for _, num_bytes in memory),
        )

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Before anything is overwritten. The one bounded wait: for writes under way that read blocks just taken away.

        Should the time not do, what they write is other requests' KV, but into blocks that are all written once more.
        """
        if not meta.preempted:
            return
        self._submit(StepMeta(preempted=meta.preempted))
        assert self._io is not None
        is_quiet = threading.Event()
        self._io.tell(Quiet(engine_request_ids=meta.preempted, event=is_quiet))
        if not is_quiet.wait(self._settings.kv_preempt_wait_s):
            log.warning("kv_preempted_under_writes", engine_request_ids=meta.preempted)

    def bind_connector_metadata(self, meta: StepMeta) -> None:
        """P's part of the step comes into force here: before the forward, in every vLLM version."""
        self._bound = meta
        is_push = meta.pushes or meta.saves or meta.pushed or meta.stopped
        if is_push or meta.expected or meta.pinned or meta.forgotten or meta.released:
            self._submit(replace(meta, preempted=(), loads=(), cancelled=(), receives=(), lost=()))

    def start_load_kv(self) -> None:
        """Starts, and cancels, the loads of the bound metadata; may come before or after the forward."""
        bound = self._bound
        if not (bound.loads or bound.cancelled or bound.receives or bound.lost):
            return
        due = StepMeta(loads=bound.loads, cancelled=bound.cancelled, receives=bound.receives, lost=bound.lost)
        self._submit(due)
        self._bound = replace(bound, loads=(), cancelled=(), receives=(), lost=())

    def wait_for_layer_load(self, layer: str) -> None:
        """Nothing: loads are asynchronous, a request runs only after its load was reported."""

    def save_kv_layer(self, layer: str) -> None:
        """The step has written its KV of this layer: what is pushed of it may leave."""
        if self._bound.saves and self._io is not None:
            self._io.tell(LayerSaved(layer=layer))

    def wait_for_save(self) -> None:
        """The forward has ended, all layers are final. Waits for nothing: blocks stay until `finished_sending`."""
        if self._bound.saves and self._io is not None:
            self._io.tell(StepSaved(at=time.monotonic()))
            self._bound = replace(self._bound, saves=())

    def clear_connector_metadata(self) -> None:
        """Ends the step."""
        self._bound = StepMeta()

    def get_transfer_results(self) -> TransferResults:
        """What ended since the last call; each id exactly once."""
        return self._results.take()

    def hurry_releases(self, is_short: bool) -> None:
        """P is short of blocks, or no longer: freed pins wake an idle engine at once, without `kv_release_delay_s`."""
        if self._io is not None:
            self._io.is_hurried = is_short

    def shutdown(self) -> None:
        """Ends readers' claims, closes sockets, threads and the transport. Idempotent."""
        if self._io is None:
            self._inbox.close()
        else:
            self._io.close()

    def _submit(self, meta: StepMeta) -> None:
        assert self._io is not None, "register_kv_caches comes first"
        self._io.submit(meta)
