"""`pdq model fetch NAME [--cache DIR]`: hands over to `python -m engine.models`, which may need torch's packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Becomes the other process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "engine.models", *argv])
