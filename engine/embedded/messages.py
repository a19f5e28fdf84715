"""What crosses between the worker's process and its engine process. Data only.

worker -> engine   Launch (first, once; pickled, see `pack_launch`), EngineRequest, Abort, Release, Stop
engine -> worker   Progress*, then Ready or StartFailed; then StepOutputs*, at last Fatal or the end of the stream
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from connector.settings import ConnectorSettings
from engine.base import EngineInfo, EngineRequest, StepOutputs
from engine.embedded.settings import EngineSettings
from pdq.wire.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this engine is, for peers and for its log lines."""

    engine_id: str
    epoch: str
    role: str
    """producer, consumer or both."""
    log_level: str = "info"
    log_json: bool | None = None
    worker_id: str = ""
    mode: str = "pull"
    """How KV gets from P to D."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    settings: EngineSettings
    connector: ConnectorSettings | None
    """None: no KV transfer; the engine prefills and decodes by itself."""
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    engine_request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    engine_request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Still starting; what is being done."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """The engine ends: what it holds is lost."""

    text: str


ToEngine = EngineRequest | Abort | Release | Stop
FromEngine = Progress | Ready | StartFailed | StepOutputs | Fatal


def pack_launch(launch: Launch) -> bytes:
    """Pickled: settings have forms that messages haven't. Nobody but the parent can write to the engine's socket."""
    return pickle.dumps(launch)


def unpack_launch(data: bytes) -> Launch:
    launch = pickle.loads(data)
    assert isinstance(launch, Launch)
    return launch


def to_engine_codec() -> Codec[ToEngine]:
    return Codec(ToEngine)


def from_engine_codec() -> Codec[FromEngine]:
    return Codec(FromEngine)
