"""The command lines of a deployment's processes. Pure: settings come in."""

from __future__ import annotations

import sys

from pdq.cli.deployment_settings import DeploymentSettings


class RoleCommands:
    def __init__(self, settings: DeploymentSettings, *, redis_url: str, role_flags: tuple[str, ...]) -> None:
        """`role_flags` are for every role."""
        model = settings.served_model
        common = ["--redis", redis_url, "--model", model.model, "--served-model-name", model.served_model_name]
        common += ["--mode", model.mode]
        common += ["--model-cache", str(model.model_cache), "--log-level", settings.log_level, *role_flags]
        self._settings = settings
        self._common = common

    def gateway(self, number: int) -> list[str]:
        """Of the gateway with this number, from 1 on."""
        settings = self._settings
        http = ["--http-host", settings.http_host, "--http-port", str(settings.http_port + number - 1)]
        return [sys.executable, "-m", "gateway", *self._common, *http]

    def worker(self, role: str) -> list[str]:
        """`role`: prefill or decode."""
        settings = self._settings
        engine = ["--engine", settings.engine, "--engine-threads", str(settings.worker_threads)]
        if settings.engine_args:
            engine += ["--engine-args", str(settings.engine_args)]
        return [sys.executable, "-m", f"{role}_worker", *self._common, *engine]
