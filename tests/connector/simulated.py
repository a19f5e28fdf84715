"""What pull's random-event test plays on: P's prefills, D's engines, what their transports are moving, a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.layout import KvRegion, Runs
from connector.legs import Report, Send, StartRead, StopRead
from connector.loads import Loads
from connector.producer import Producer
from connector.renewals import Renewals
from connector.settings import ConnectorSettings
from connector.side_channel import Answer, Claimed, Done, Hello, Renewed, Request, TransferMessage, Verified, Verify
from connector.step import Load, StepMeta
from connector.transfers import Outcome, TransferKey
from pdq.wire.types import KvTicket, Pair, pack_ids

SETTINGS = ConnectorSettings(kv_lease_s=6.0, kv_hold_s=20.0, kv_wait_s=15.0, kv_answer_s=0.5, kv_answer_tries=4)
P_BLOCKS, D_BLOCKS, BASE = 12, 24, 1000
PAIR = Pair(gen=1, attempt=1)
P_AT = "tcp://p:7"


def region(num_blocks: int) -> KvRegion:
    """A block is one byte, so an address is a block."""
    return KvRegion(layer="all", base_address=BASE, block_stride_bytes=1, num_blocks=num_blocks)


@dataclass
class Reading:
    leg_id: int
    source: str
    """P's transport."""
    pairs: list[tuple[int, int]]
    """(local block, remote block) still to be copied."""
    stop: bool = False
    is_broken: bool = False


@dataclass
class Prefill:
    """Of one (transfer, pair). The name says it all: `r3:2` is the second attempt of the transfer r3."""

    number: int
    key: TransferKey
    epoch: str
    blocks: list[int]
    content: list[int]
    is_written: bool = False
    """All bytes are in place, so a ticket may exist; P's worker half may not know it yet."""
    is_pinned: bool = False
    contact: dict[str, float] = field(default_factory=dict)
    """Per consumer that has an unfinished claim: when P heard of it last."""

    def heard_of(self, consumer: str, now: float, *, claims: bool) -> None:
        if claims or consumer in self.readers(now):
            self.contact[consumer] = now

    def readers(self, now: float) -> list[str]:
        return [name for name, at in self.contact.items() if now - at < SETTINGS.kv_lease_s]

    @property
    def name(self) -> str:
        return f"{self.key.transfer_id}:{self.key.pair.attempt}"

    @property
    def ticket(self) -> KvTicket:
        return KvTicket(
            transfer_id=self.key.transfer_id,
            pair=self.key.pair,
            engine_id="p",
            epoch=self.epoch,
            host="p",
            port=7,
            tp_size=1,
            block_size=16,
            num_tokens=16 * len(self.blocks),
            block_ids=pack_ids(self.blocks),
        )


@dataclass
class Loading:
    """At D."""

    content: list[int]
    blocks: list[int]


@dataclass
class Consumer:
    name: str
    loads: Loads
    renewals: Renewals
    memory: list[int] = field(default_factory=lambda: [0] * D_BLOCKS)
    free: list[int] = field(default_factory=lambda: list(range(D_BLOCKS)))
    readings: list[Reading] = field(default_factory=list)
    to_p: list[Request] = field(default_factory=list)
    from_p: list[Answer] = field(default_factory=list)
    waiting: dict[str, Prefill] = field(default_factory=dict)
    """Requests that have come, without blocks yet."""
    loading: dict[str, Loading] = field(default_factory=dict)


def descriptors_of(runs: Runs) -> list[tuple[int, int]]:
    """(local block, remote block)."""
    return [
        (local - BASE + i, remote - BASE + i)
        for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True)
        for i in range(length)
    ]


class PullSimulation:
    """Both sides' cores. `settle` after every event."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.prefills: dict[str, Prefill] = {}
        self.tickets: dict[str, Prefill] = {}
        """Of every prefill that was written; the newest last."""
        self.freed: list[str] = []
        self.attempts: dict[str, int] = {}
        self.num_lives = 0
        self.start_p()
        self.consumers = [
            Consumer(
                name,
                Loads(
                    SETTINGS,
                    hello=Hello(epoch="", consumer=name, rank=0, tp_size=1, fingerprint="a=1"),
                    regions=[region(D_BLOCKS)],
                ),
                Renewals(SETTINGS, consumer=name, tp_size=1),
            )
            for name in ("d-1", "d-2")
        ]

    def start_p(self) -> None:
        """Its process, for the first time or again, at the same address."""
        self.num_lives += 1
        self.epoch = f"p-{self.num_lives}"
        self.transport = f"p:{self.num_lives}"
        self.memory = [0] * P_BLOCKS
        self.free = list(range(P_BLOCKS))
        self.prefills.clear()
        self.producer = Producer(
            epoch=self.epoch,
            rank=0,
            tp_size=1,
            fingerprint="a=1",
            regions=(region(P_BLOCKS),),
            lease_s=SETTINGS.kv_lease_s,
            hold_s=SETTINGS.kv_hold_s,
            transport_at=lambda: (self.transport, 0),
        )

    def load_of(self, prefill: Prefill, blocks: list[int], first_block: int) -> Load:
        return Load(
            engine_request_id=prefill.name, ticket=prefill.ticket, block_ids=tuple(blocks), first_block=first_block
        )

    def pin(self, prefill: Prefill) -> None:
        self.write(prefill)
        prefill.is_pinned = True
        self.apply(StepMeta(pinned=(prefill.name,)))

    def write(self, prefill: Prefill) -> None:
        for block, value in zip(prefill.blocks, prefill.content, strict=True):
            self.memory[block] = value
        prefill.is_written = True
        self.tickets[prefill.name] = prefill

    def apply(self, meta: StepMeta) -> None:
        self.producer.apply(meta, self.now)
        self.settle()

    def p_hears(self, d: Consumer, message: Request) -> None:
        prefill = self._prefill_of(message)

        def reply(answer: Answer) -> None:
            d.from_p.append(answer)
            if prefill and isinstance(answer, Claimed | Verified | Renewed):
                prefill.heard_of(d.name, self.now, claims=isinstance(answer, Claimed))

        if prefill and (isinstance(message, Done) or (isinstance(message, Verify) and message.is_last)):
            prefill.contact.pop(d.name, None)
        assert isinstance(message, Request)
        self.producer.on_message(message, reply, self.now)  # type: ignore[arg-type]
        self.settle()

    def d_hears(self, d: Consumer, answer: Answer) -> None:
        d.renewals.on_message(P_AT, answer, self.now)
        d.loads.on_message(P_AT, answer, self.now)
        self.settle()

    def _prefill_of(self, message: Request) -> Prefill | None:
        found = [p for p in self.prefills.values() if isinstance(message, TransferMessage) and p.key == message.key]
        return found[0] if found and isinstance(message, TransferMessage) and message.epoch == self.epoch else None

    def settle(self) -> None:
        self.producer.tick(self.now)
        for pin in self.producer.take_freed():
            prefill = self.prefills.pop(pin.engine_request_id)  # KeyError: freed twice, or never pinned
            assert prefill.is_pinned
            assert not prefill.readers(self.now), f"freed ({pin.cause}) under {prefill.readers(self.now)}"
            self.freed.append(prefill.name)
            self.free += prefill.blocks
            for block in prefill.blocks:
                self.memory[block] = -1  # anybody's now
        for d in self.consumers:
            d.to_p += [message for _, message in d.renewals.tick(self.now)]
            for name in d.renewals.take_gone():
                del d.waiting[name]
            d.loads.tick(self.now)
            for action in d.loads.take_actions():
                self._do(d, action)

    def _do(self, d: Consumer, action: Send | StartRead | StopRead | Report) -> None:
        if isinstance(action, Send):
            d.to_p.append(action.message)
        elif isinstance(action, StartRead):
            d.readings.append(Reading(action.leg_id, action.address, descriptors_of(action.runs)))
        elif isinstance(action, StopRead):
            for reading in d.readings:
                reading.stop = reading.stop or reading.leg_id == action.leg_id
        else:
            self._reported(d, action)

    def _reported(self, d: Consumer, report: Report) -> None:
        name = report.load.engine_request_id
        loading = d.loading.pop(name)  # KeyError: reported twice
        writing = {local for reading in d.readings for local, _ in reading.pairs}
        assert not writing & set(loading.blocks), "reported while its blocks may be written"
        if report.outcome is Outcome.OK:
            assert [d.memory[block] for block in loading.blocks] == loading.content
        d.free += loading.blocks

    def talk_to(self, d: Consumer) -> None:
        """All messages of one D and their answers arrive."""
        queues: tuple[tuple[list, Callable], ...] = ((d.to_p, self.p_hears), (d.from_p, self.d_hears))  # type: ignore[type-arg]
        for _ in range(4):
            for queue, hear in queues:
                while queue:
                    hear(d, queue.pop(0))
