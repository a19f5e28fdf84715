"""Decode worker (D): admits finished prefills, reads their KV, decodes, sends token deltas to the gateways.

Life of a request (`requests.py` is its state table, `worker.py` performs what the table says):
1. KvReady from a prefill worker: Busy unless prompt and expected output fit beside all that was promised;
2. admitting: Admit to the gateway, and the engine starts (and reads the KV) at the same time; tokens are held back;
3. Go: Accepted to the prefill worker, held tokens leave, from now on each engine step sends one frame per gateway;
   Gone: the engine request is aborted, Gone to the prefill worker;
4. finish: the last delta; or Failed, and the gateway decides; or Cancel, and the engine aborts.
Answers are remembered for a while: a KvReady that is repeated after its answer was lost gets the same answer.

Rules: no HTTP, no text, no Redis but the registry. Sockets only through broker.links.
"""
