"""The wire: value types, the msgpack codec, numbered links and the ZeroMQ sockets.

- `types.py`: values that cross process borders on both sides. Data only.
- `codec.py`: message dataclasses <-> bytes.
- `link.py`: numbered frames: retained until acknowledged, repeated, accepted once and in order. Pure.
- `sockets.py`: asyncio: `Inbox` (one per process), `Peers` (links by endpoint), `PeerLink` (`peer_link.py`).
- `blocking.py`: the same for threads without a loop: `BlockingInbox`, `BlockingLink`, `Hub`.
- Below them: `nonblocking.py` (ROUTER and DEALER with our options), `pump.py` (asyncio reads them), `endpoints.py`.

Rules: only this package imports zmq and msgpack. Nothing here knows what a message means. A send never blocks: it says
False, and the caller decides. Sockets are made in the thread that uses them and never cross a fork.
"""
