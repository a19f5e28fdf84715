"""Prefill worker (P): takes jobs when it is free, computes their KV, hands it to a decode worker.

Life of a job (one task each, `job.py`):
1. taken: lease and attempt number from the queue, only if P's own KV pool has room for the whole prompt (`taker.py`);
2. computing: the engine prefills; the lease is renewed while the engine makes progress (`leases.py`);
3. offering: KvReady to the decode worker that placement chose; Busy means the next one (`handover.py`);
4. parked: every decode worker is busy; woken by Room, given back after `park_s`;
5. settled: Accepted (D has Go) or Gone; the KV stays pinned until D has read it.
A lease that is lost (reaped, cancelled) cancels the task: nothing it does afterwards can have an effect.

Rules: no HTTP, no text. Redis only through the queue port, sockets only through broker.links.
"""
