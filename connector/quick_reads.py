"""Small reads that the IO thread does itself: begun, then looked after between short naps, several at once.

Two changes of thread cost as much as reading 128 KiB. The transport still has one owner at a time: while the reading
thread has work, or a write is under way, small reads queue there too; and whatever is not over in a few milliseconds,
fails, or meets a large read is handed to it, begun as it is. So a peer that stands still holds up the IO thread for
`_PATIENCE_S` at most: beginning doesn't wait for a peer that was read from before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from connector.exclusive_transport import TransportBusy
from connector.legs import StartRead
from connector.reader import Reader
from connector.settings import ConnectorSettings
from connector.transport import PendingRead, Transport, TransportError

_PATIENCE_S: Final = 0.003
_MAX_KNOWN: Final = 4096
NAP_S: Final = 20e-6
"""Some 80 us with the kernel's timer slack; a small read takes 150."""


@dataclass(slots=True)
class _Quick:
    action: StartRead
    pending: PendingRead
    began: float
    stop: bool = False


class QuickReads:
    """All methods are called by the IO thread. `now` is time.monotonic()."""

    def __init__(self, transport: Transport, reader: Reader, settings: ConnectorSettings) -> None:
        self._transport = transport
        self._reader = reader
        self._settings = settings
        self._begun: list[_Quick] = []
        self._finished: list[int] = []
        self._known: set[tuple[str, int]] = set()
        """(peer, generation of the transport) that was read from: the first time means a handshake, which may hang."""

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def has_finished(self) -> bool:
        """`take_finished` has something."""
        return bool(self._finished)

    def begin(self, action: StartRead) -> None:
        """Its end comes out of `take_finished`, or out of the reader's events."""
        runs = action.runs
        is_small = runs.num_bytes <= self._settings.kv_direct_bytes and len(runs) <= self._settings.kv_max_descriptors
        if not is_small or not self._reader.is_idle or not self._is_known(action.address):
            self._hand_over()
            self._reader.submit(action.leg_id, action.address, runs)
            return
        began = time.monotonic()
        try:
            pending = self._transport.begin_read(action.address, runs.local, runs.remote, runs.lengths)
        except TransportBusy:  # the writing thread's call
            self._hand_over()
            self._reader.submit(action.leg_id, action.address, runs)
            return
        except TransportError as exc:
            self._hand_over()
            self._reader.submit(action.leg_id, action.address, runs, pending=_Failed(str(exc)), began=began)
            return
        self._begun.append(_Quick(action, pending, began))

    def stop(self, leg_id: int) -> bool:
        """False: none of these. True: it will end all the same, in a moment."""
        for quick in self._begun:
            if quick.action.leg_id == leg_id:
                quick.stop = True
                return True
        return False

    def look(self) -> bool:
        """True: something has changed. Hands to the reading thread what takes too long or fails."""
        finished: list[int] = []
        is_over = False
        for quick in self._begun:
            try:
                if quick.pending.is_done():
                    finished.append(quick.action.leg_id)
                elif time.monotonic() - quick.began > _PATIENCE_S:
                    is_over = True
            except TransportError as exc:
                quick.pending = _Failed(str(exc))
                is_over = True
        self._begun = [quick for quick in self._begun if quick.action.leg_id not in finished]
        self._finished += finished
        if is_over:
            self._hand_over()
        return is_over or bool(finished)

    def take_finished(self) -> list[int]:
        """Leg ids whose bytes are in place, each once."""
        finished, self._finished = self._finished, []
        return finished

    def _is_known(self, peer: str) -> bool:
        """From the second question on, as long as no fence was needed."""
        known = peer, self._transport.generation
        if known in self._known:
            return True
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(known)
        return False

    def _hand_over(self) -> None:
        begun, self._begun = self._begun, []
        for quick in begun:
            action = quick.action
            self._reader.submit(
                action.leg_id, action.address, action.runs, pending=quick.pending, began=quick.began, stop=quick.stop
            )


class _Failed:
    """A read that can't be asked again how it stands."""

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def is_done(self) -> bool:
        raise TransportError(self._cause)
