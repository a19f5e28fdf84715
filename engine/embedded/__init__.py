"""The embedded engine: continuous batching over a paged KV pool, in a process of its own.

Folder rules
- Deciding: `block_pool.py`, `free_runs.py`, `prefix_cache.py`, `request.py`, `intake.py`, `scheduler.py`, `endings.py`.
  They know no clock, no socket, no runner and no transport.
- `core.py` is one step, the only caller of worker half and runner, in vLLM's order; `boot.py` makes it.
- Processes: `client.py` is the worker's side (`engine.base.Engine`), `process.py` the engine's loop, `pipe.py` the
  engine's end of the socket between them, `messages.py` what crosses it.
- Runners (`runner.py` is their port) know no scheduler: they compute the chunks of one step and write KV blocks.
  `sim_*.py` is the simulated one; `torch_*.py` and what they import the real one.

Life of a request
 1. The worker calls `submit`; `EngineRequest` crosses to the engine process.
 2. `Scheduler.add` checks that it can ever fit; the connector half hears `on_new_request`. State WAITING.
 3. A step admits it when its prompt's blocks are free beside a watermark. Local prefix blocks are shared by reference;
    external tokens (D side) make it WAITING_FOR_REMOTE_KVS, holding its blocks, until `finished_recving`: D's halves
    read them (LoadKv), or P's write them (ReceiveKv).
 4. RUNNING: prompt chunks under the step's token budget, after all decodes of that step.
    D has the whole prompt's KV then, and recomputes the last prompt position only, to sample the first token.
 5. Each step appends a token, until a stop token, max_tokens or the model's length. No block free: the youngest
    request is preempted (blocks freed, back to the head of the queue, computed again with what it had generated).
 6. Finished. A prefill-only request (P side) is FINISHED_PINNED until the connector reports `finished_sending`, in
    push also after an abort;
    a request that was aborted while remote KV came in is DRAINING until `finished_recving`.
 7. Its blocks go back to the pool, full ones stay findable as prefix cache; `released` tells the worker, exactly once.
"""
