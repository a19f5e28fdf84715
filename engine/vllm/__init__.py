"""vLLM as an engine: `AsyncLLM` inside the worker process, its engine core and ranks in processes of their own.

The name doesn't hide vLLM's own package: imports are absolute, `import vllm` is theirs. Modules:

| module | job |
|---|---|
| `settings` | what is pdq's to decide beside vLLM's own arguments |
| `client` | `VllmEngine`: engine.base.Engine over AsyncLLM's engine core |
| `launch` | vLLM's arguments checked, its configuration made, AsyncLLM built; blocks, so it runs in a thread |
| `checks` | what can be refused before vLLM is imported |
| `environment` | the variables that vLLM and its processes read |
| `child` | vLLM's child processes: logs, reasons of failures, death with the worker |
| `requests` | pure: open requests, engine core outputs -> EngineOutputs, `released` exactly once |
| `core_request` | an EngineRequest -> a request that vLLM has checked, or a refusal |
| `sampling` | pure: pdq's SamplingParams -> the arguments of vLLM's |
| `logprobs` | pure: vLLM's arrays -> TokenLogprob |
| `side_channel_ports` | keeps the connector's ports free until the ranks listen on them |

Nothing but `launch`, `client` and `core_request` touches vLLM's objects, and only `launch` imports vLLM. The engine
core's messages are read as they come, one per step, without vLLM's output processor: ids need no detokeniser, and
per-request queues cost more than the rest (ADR 13).
"""
