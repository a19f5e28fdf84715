"""pdq: what every process shares.

- `pdq.wire`: value types, the msgpack codec, numbered links and the ZeroMQ sockets; only here zmq and msgpack.
- `pdq.runtime`: settings, logs, metrics, signals, port checks.
- `pdq.cli`: the command line; starts roles with `python -m`.
"""
