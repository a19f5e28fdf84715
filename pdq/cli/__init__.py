"""The command line. Starts roles with `python -m`; imports the broker and `pdq.runtime`, no role and no engine.

| module | job |
|---|---|
| `main` | `pdq COMMAND ...` |
| `up` | `pdq up`: everything on this machine until Ctrl-C |
| `demo` | `pdq demo`: everything up, one chat question, a table, everything down |
| `status` | `pdq status`: workers, queue, requests in flight |
| `model` | `pdq model fetch NAME` |
| `deployment` | what `up` and `demo` start, in which order, and how it stops |
| `children` | keeps processes running, with back-off; ends them with their whole process group |
| `redis_server` | the embedded Redis-compatible server |
| `run_folder` | where a deployment leaves its addresses, pids and logs |
| `gateway_client` | the few HTTP calls that the command line makes |
"""
