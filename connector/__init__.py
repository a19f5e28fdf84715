"""Moves KV blocks from the prefill engine (P) to the decode engine (D), from inside both engines.

A scheduler half sits beside each engine's scheduler, a worker half beside each rank's KV memory. They know no engine:
whoever owns them calls their hooks in vLLM's order. Rules of this folder:

- The pure cores (pull: `transfers`, `pins`, `loads`, `legs`, `presence`, `renewals`; push: `push_states`, `push_legs`,
  `push_course`, `pushes`, `receptions`, `offers`; both: `layout`, `tp_plan`, `greetings`, `asks`) know no clock, socket
  or thread: `now` is an argument, messages and actions are values. The laws stand on top of `transfers` and
  `push_states`.
- Hooks never wait for the network, but for `handle_preemptions` and, in vLLM, steps that compute nothing: they hand
  values to a thread. Four threads do the waiting: `io_thread` (a worker half's sockets and all cores), `reader` (large
  and failed reads, fences), `writer` (writes, fences against writers), `renewal_thread` (the scheduler half's links).
  Each socket and core belongs to one of them, the transport to one at a time.
- Ids in and out are engine_request_ids; between P and D a transfer is (transfer id, pair), and P's epoch comes along.
- vLLM finds us as `plugin`, with `vllm_plugin` behind it; the embedded engine calls the halves itself.
- `params` is the only place that knows the kv_transfer_params dict; `mooncake*` the only one that knows Mooncake.

The life of one pull transfer (P's files: `producer` over `pins`; D's: `loads` over `legs`, `greetings` and `presence`):

 1. P schedules a prefill: Expect goes to its worker half, so that no reader can come too early.
 2. The prefill ends: `request_finished` says "keep the blocks" and returns the ticket; the pin is *held*.
 3. The ticket reaches D: `on_new_request` starts renewals (RENEW), which turn the pin into a *leased* one.
 4. D allocates blocks: `update_state_after_alloc` makes a Load of the tokens that D hasn't got. None at all: DONE(ok).
 5. D's worker half greets P's rank, once per epoch: HELLO -> META with regions, or REJECT with what differs.
 6. CLAIM -> CLAIMED with the transport's address, or GONE. From here to its DONE this rank is an active reader.
    Not for a small read from a P that answered a moment ago: its ticket and the address last heard of are enough.
 7. Coalesced runs are read, at most 512 descriptors a call, RENEW goes on meanwhile: small ones by `quick_reads` in
    the IO thread, others by the reader.
 8. VERIFY -> VERIFIED: the pin was never freed. GONE: what was read is worthless. The VERIFY of a load that has one
    leg is its DONE(ok) too.
 9. D reports the id in `finished_recving`, and in `failed_recving` if it isn't valid. Not before the call in flight has
    ended well, or the transport was fenced: later nobody writes these blocks.
10. DONE(ok | failed | cancelled), repeated until acknowledged. P frees after ok or cancelled, or at the lease's end,
    and reports the id in `finished_sending`; a release waits for active readers.

The life of one push (P's files: `pushed_prefills`, `pushes` over `push_course`, `writer`; D's: `receivers`, `offers`,
`receptions`; `push_exchange` joins both sides' cores with the threads; tables and laws: `push_states`):

 1. P's engine is given the request, D's too, in any order. P's worker half knows it from the next step on (Push).
 2. D allocates: RECV_READY goes to every P rank, again and again while D waits: it is the sign of life of both sides.
    D's worker half gets a Receive. Nothing missing at D: RECV_READY says so, once, and P writes nothing.
 3. P's rank greets D's (HELLO -> META), then asks: OPEN -> OPENED with the transport's address, or GONE. Who was not
    answered can't write.
 4. Each step's Save names the blocks that it makes final; `save_kv_layer` tells when a layer of them is. What is final
    and wanted is written by the writing thread; after a late OPENED all of it at once, few descriptors per layer.
 5. All layers of all blocks are written: PUSH_DONE with the number of tokens, until acknowledged. D's rank reports the
    id in `finished_recving` when all its P ranks are done, P's rank its own in `finished_sending`.
 6. A call fails: P fences, drops what is queued and asks again, naming the broken generation; D fences before it
    answers. Everything is written once more; the third time, or after a stall, PUSH_FAIL.
 7. D wants it no more (abort, P silent or gone): CANCEL -> CANCELLED once P's call in flight has ended. No answer: D
    fences. Only then its blocks are free. P aborts: the call in flight ends, PUSH_FAIL, `finished_sending`.
 8. P preempts: `handle_preemptions` waits, bounded, for the call in flight; prefill and push start over.

P may have more ranks than D (`tp_plan`). A rank of D then has one leg per rank of P that holds heads which it needs.
All its legs make one load, or one reception: done when all are, failed with the first. Ranks of P whose heads another
one delivers already (MLA, fewer heads than ranks) are spares. Pull: D renews their leases like the others', and DONE
tells them how the load ended, so that a failed one may be tried again. Push: they find out by themselves, write
nothing, and say so in PUSH_DONE. Each rank of P has one rank of D as consumer and frees for itself; the engine frees a
block when all its ranks have reported.
"""
