"""What stands behind `connector/plugin.py`: vLLM's hooks, values and memory, in the terms of the connector's halves.

- `scheduler` and `worker` are one half's side each; what differs between versions of vLLM is in `hooks` alone.
- `metrics` and `connector/plugin.py` are loaded by vLLM and import it at the top; the others, in functions if at all.
- Nothing here decides about a transfer: the cores of `connector` do. What the two sides tell each other is `news`.
"""
