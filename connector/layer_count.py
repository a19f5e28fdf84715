"""A count of computed layers that another process can read: a step that takes long is told from one that hangs.

A file of 8 bytes, mapped into both processes: counting costs no call into the system.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_COUNT = struct.Struct("<Q")


class LayerCount:
    """One process counts, one reads; neither waits for the other."""

    def __init__(self, path: Path) -> None:
        """Of an existing file (`create`). Raises OSError, and ValueError when it is no such file."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _COUNT.size)
        (self._count,) = _COUNT.unpack_from(self._map)

    @staticmethod
    def create(path: Path) -> None:
        path.write_bytes(_COUNT.pack(0))

    def add(self) -> None:
        """Only where layers are computed."""
        self._count += 1
        _COUNT.pack_into(self._map, 0, self._count)

    def read(self) -> int:
        (count,) = _COUNT.unpack_from(self._map)
        return int(count)

    def close(self) -> None:
        self._map.close()
