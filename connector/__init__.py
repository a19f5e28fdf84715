"""Moves KV blocks from the prefill engine (P) to the decode engine (D), from inside both engines.

A scheduler half sits beside each engine's scheduler, a worker half beside each rank's KV memory. They know no engine:
whoever owns them calls their hooks in vLLM's order. Rules of this folder:

- The pure cores (`transfers`, `layout`, `pins`, `loads`, `legs`, `greetings`, `presence`, `renewals`, `asks`) know no
  clock, socket or thread: `now` is an argument, messages and actions are values. The laws stand on top of `transfers`.
- Hooks never wait for the network: they hand values to a thread. Three threads do the waiting: `io_thread` (a worker
  half's sockets and both cores), `reader` (the transport, one blocking call at a time), `renewal_thread` (the scheduler
  half's links). Each socket, core and transport belongs to one of them.
- Ids in and out are engine_request_ids; between P and D a transfer is (transfer id, pair), and P's epoch comes along.
- `params` is the only place that knows the kv_transfer_params dict; `mooncake*` the only one that knows Mooncake.

The life of one pull transfer (P's files: `producer` over `pins`; D's: `loads` over `legs`, `greetings` and `presence`):

 1. P schedules a prefill: Expect goes to its worker half, so that no reader can come too early.
 2. The prefill ends: `request_finished` says "keep the blocks" and returns the ticket; the pin is *held*.
 3. The ticket reaches D: `on_new_request` starts renewals (RENEW), which turn the pin into a *leased* one.
 4. D allocates blocks: `update_state_after_alloc` makes a Load of the tokens that D hasn't got. None at all: DONE(ok).
 5. D's worker half greets P's rank, once per epoch: HELLO -> META with regions, or REJECT with what differs.
 6. CLAIM -> CLAIMED with the transport's address, or GONE. From here to its DONE this rank is an active reader.
    Not for a small read from a P that answered a moment ago: its ticket and the address last heard of are enough.
 7. The reader thread reads coalesced runs, at most 512 descriptors a call; RENEW goes on meanwhile.
 8. VERIFY -> VERIFIED: the pin was never freed. GONE: what was read is worthless. The VERIFY of a load that has one
    leg is its DONE(ok) too.
 9. D reports the id in `finished_recving`, and in `failed_recving` if it isn't valid. Not before the call in flight has
    ended well, or the transport was fenced: later nobody writes these blocks.
10. DONE(ok | failed | cancelled), repeated until acknowledged. P frees after ok or cancelled, or at the lease's end,
    and reports the id in `finished_sending`; a release waits for active readers.

Push will add RECV_READY, PUSH_DONE and PUSH_FAIL, a writing job beside the reading one, and the per-layer hooks.
"""
