"""What every process shares: settings, logs, metrics, signals and drain, port checks.

Imports at most `pdq.wire`.

| module | job |
|---|---|
| `errors` | StartupError: exit 2, says what to change |
| `settings` | `load`: flag > environment > TOML > default, into one frozen dataclass |
| `setting_fields`, `setting_text` | the settings of a dataclass and their parsing; `--help` and `--print-config` |
| `common` | RuntimeSettings: the settings that every role has |
| `logs` | structlog set-up |
| `process` | `run_role`: event loop, exit codes, the `ready` line |
| `signals` | Drain: first SIGTERM/SIGINT drains, the second one ends the process; die with the parent |
| `child` | `python -m pdq.runtime.child PID -- COMMAND`: runs COMMAND, which dies with process PID |
| `ports` | fixed ports are free before anything starts |
| `metrics` | Prometheus registry and listener of a process |
| `ids` | worker ids |
"""
