"""The command line. Starts roles with `python -m`; imports the broker and `pdq.runtime`, no role and no engine.

| module | job |
|---|---|
| `main` | `pdq COMMAND ...` |
| `up` | `pdq up`: everything on this machine until Ctrl-C |
| `demo` | `pdq demo`: everything up, one chat question, a table, everything down |
| `status` | `pdq status`: workers, queue, requests in flight |
| `top` | `pdq top`: the same, live |
| `scale` | `pdq scale prefill=N decode=N`: more or fewer workers of a running `pdq up` |
| `drain` | `pdq drain WORKER_ID` |
| `dead` | `pdq dead list / show / drop` |
| `model` | `pdq model fetch NAME` |
| `deployment` | what `up` and `demo` start, in which order, and how it stops |
| `deployment_settings`, `role_commands` | its settings, and the command lines that follow from them |
| `fleet` | the running processes of a deployment |
| `scale_control` | `pdq up`'s side of `pdq scale` and `pdq drain` |
| `children` | keeps processes running, with back-off; ends them with their whole process group |
| `redis_server` | the embedded Redis-compatible server |
| `run_folder` | where a deployment leaves its addresses, pids and logs |
| `store` | how `status`, `top`, `scale`, `drain` and `dead` reach Redis |
| `snapshot`, `tables`, `rates` | one moment of a model, and how it is shown |
| `gateway_client` | the few HTTP calls that the command line makes |
"""
