"""The queue side: the prefill queue and the registry in Redis, and the typed messages between processes.

Rules of this folder:
- Only here is `redis` imported (and by the launcher of the embedded server). Nothing of an engine or connector.
- `base.py` holds the ports; `memory*.py` are the twins, `redis_*.py` the real thing. One contract test body for all.
- Every key and its content is listed in `keys.py`; every script's keys in its own header in `lua/`.
- All redis errors end at `redis_calls.py` and `redis_wake.py`: what comes out is QueueUnavailable.
- `delivery.py`, `placement.py`, `promises.py` and `silence.py` are pure.

Life of a job:
1. The gateway enqueues it: payload, request hash, stream entry and place in `ready` (score `due`), in one script.
2. An idle prefill worker sleeps in XREAD, which takes nothing. It wakes when something is added or comes back.
3. A worker takes what is due first and fits: the entry leaves `ready` and is pending for this worker (XPENDING), the
   attempt number rises. Jobs past their deadline, or of a gateway that is gone, end here, and their gateway is told.
4. While it works, the worker renews its lease. Every change is fenced by owner and attempt: who lost the lease gets
   False, and stops.
5a. The decode worker accepted the request: settle. Entry and payload are gone, the request hash stays for `req_ttl_s`.
5b. The worker can't go on: give back. The job returns to its old place; a failure counts, a mere "not now" does not.
5c. The worker died: after one lease any other worker's reap puts the job back to its old place; counts as a failure.
    A job that failed is taken alone from then on, by a worker that has nothing else: who brings it down falls alone.
5d. `max_failures` failures: the job goes to the dead letters, and the gateway is told.
6. The gateway may cancel at any of these points, and even before 1: cancel beats enqueue.
7. A worker that ends takes its name out of the group, unless it holds jobs; reaping drops the names of killed ones.
Afterwards stream, pending list and `ready` hold nothing of the job.
"""
