"""The worker's side of the embedded engine: `engine.base.Engine` over a socket to the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final

import structlog

from connector.settings import ConnectorSettings
from engine.base import EngineError, EngineInfo, EngineRequest, StepOutputs
from engine.embedded.messages import (
    Abort,
    Fatal,
    FromEngine,
    Identity,
    Launch,
    Progress,
    Ready,
    Release,
    StartFailed,
    Stop,
    ToEngine,
    from_engine_codec,
    pack_launch,
    to_engine_codec,
)
from engine.embedded.pipe import LENGTH
from engine.embedded.settings import EngineSettings

_MAX_FRAME_BYTES: Final = 1 << 30
ENGINE_COMMAND: Final = (sys.executable, "-m", "engine.embedded.process")
"""Started with two more arguments: the descriptor of its socket, and this process's id."""
_KILL_S: Final = 10.0
"""A killed process may take this long to give its memory back."""
_log = structlog.get_logger(__name__)


class EmbeddedEngine:
    """One engine process. `start` once, then any task may submit, abort and release; one task reads `outputs`.

    Must be started from the main thread: the engine process dies with the thread that started it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        connector: ConnectorSettings | None,
        *,
        role: str,
        engine_id: str,
        epoch: str | None = None,
        log_level: str = "info",
        log_json: bool | None = None,
        worker_id: str = "",
        mode: str = "pull",
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        """`role`: producer (P), consumer (D) or both. `connector` None: no KV transfer. `epoch` None: a random one."""
        self._settings = settings
        self._command = command
        self._launch = Launch(
            settings=settings,
            connector=connector,
            identity=Identity(
                engine_id=engine_id,
                epoch=epoch or secrets.token_hex(8),
                role=role,
                log_level=log_level,
                log_json=log_json,
                worker_id=worker_id,
                mode=mode,
            ),
        )
        self._encode = to_engine_codec().encode
        self._decode = from_engine_codec().decode
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_stopping = False
        self._is_gone = False

    @property
    def pid(self) -> int | None:
        """Of the engine process; None before `start`."""
        return self._process.pid if self._process else None

    async def start(self) -> EngineInfo:
        """Returns when the engine is ready; logs what it is doing. Raises EngineError with the engine's reason."""
        assert self._process is None, "an engine is started once"
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=mine, limit=1 << 20)
        self._send_frame(pack_launch(self._launch))
        try:
            async with asyncio.timeout(self._settings.engine_start_s):
                return await self._until_ready()
        except TimeoutError as error:
            await self._end(grace_s=0.0)
            raise EngineError(
                f"the engine was not ready after {self._settings.engine_start_s:g} s (engine_start_s)"
            ) from error
        except BaseException:
            await self._end(grace_s=0.0)
            raise

    async def submit(self, request: EngineRequest) -> None:
        """Raises EngineError when the engine is gone."""
        await self._send(request)

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """One item per step that had news, and at least one a second. Ends after `stop`, raises EngineError."""
        while (message := await self._receive()) is not None:
            if isinstance(message, StepOutputs):
                yield message
            elif isinstance(message, Fatal):
                raise EngineError(message.text)
        if not self._is_stopping:
            raise EngineError(f"the engine process ended: {await self._exit_reason()}")

    async def abort(self, engine_request_id: str) -> None:
        await self._send(Abort(engine_request_id=engine_request_id))

    async def release(self, engine_request_id: str) -> None:
        await self._send(Release(engine_request_id=engine_request_id))

    async def stop(self) -> None:
        """Ends the engine process; what it holds is dropped. Idempotent, also after a failed start."""
        self._is_stopping = True
        with contextlib.suppress(EngineError):
            await self._send(Stop())
        await self._end(grace_s=self._settings.engine_stop_s)

    async def _until_ready(self) -> EngineInfo:
        while (message := await self._receive()) is not None:
            match message:
                case Ready(info=info):
                    _log.info(
                        "engine_ready", pid=self.pid, total_blocks=info.total_blocks, fingerprint=info.fingerprint
                    )
                    return info
                case Progress(text=text):
                    _log.info("engine_starting", doing=text)
                case StartFailed(text=text):
                    raise EngineError(text)
                case _:
                    raise EngineError(f"unexpected {type(message).__name__} before the engine was ready")
        raise EngineError(f"the engine process ended before it was ready: {await self._exit_reason()}")

    async def _receive(self) -> FromEngine | None:
        """The next message; None at the end of the stream."""
        assert self._reader is not None, "start comes first"
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > _MAX_FRAME_BYTES:
                raise EngineError(f"the engine announced a frame of {length} bytes")
            message, _ = self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._is_gone = True
            return None
        return message

    async def _send(self, message: ToEngine) -> None:
        # Not drained: an engine in a long step reads nothing, and that must not hold up the worker's loop.
        self._send_frame(self._encode(message))

    def _send_frame(self, data: bytes) -> None:
        if self._is_gone or self._writer is None or self._writer.is_closing():
            raise EngineError("the engine is not running")
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def _exit_reason(self) -> str:
        assert self._process is not None
        try:
            async with asyncio.timeout(5.0):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its socket but still runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    async def _end(self, *, grace_s: float) -> None:
        """Waits for the process, kills it after `grace_s`, closes the socket."""
        process = self._process
        if process is not None and process.returncode is None:
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                async with asyncio.timeout(_KILL_S):
                    await process.wait()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
