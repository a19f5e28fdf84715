"""The tests' side of `vllm_pair`: two engines in a process of their own, asked by name, answering with futures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from connector.params import PullProducer, PushConsumer, PushProducer, params_of
from connector.vllm_plugin.news import joined_news
from pdq.wire.types import KvSource, Pair
from tests.servers import free_port
from tests.vllm.reference import BLOCK_SIZE, MAX_TOKENS

START_S = 400
LIMIT_S = 120


class EnginePair:
    """Commands to the process of `vllm_pair`, whose answers are futures."""

    def __init__(self, model_dir: Path) -> None:
        self.ports = {"a": free_port(), "b": free_port()}
        command = [sys.executable, "-m", "tests.connector_plugin.vllm_pair", str(model_dir)]
        self._process = subprocess.Popen(
            [*command, *map(str, self.ports.values())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._numbers, self._names = itertools.count(1), itertools.count(1)
        self._answers: dict[int, Future[Any]] = {0: Future()}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._answers[0].result(START_S) == "ready"

    def call(self, command: str, **arguments: Any) -> Future[Any]:
        number = next(self._numbers)
        answer = self._answers[number] = Future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": number, "command": command, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return answer

    def ask(self, command: str, **arguments: Any) -> Any:
        return self.call(command, **arguments).result(LIMIT_S)

    def new_name(self) -> str:
        return f"t{next(self._names)}"

    def prefill(self, name: str, ids: list[int], *, push: bool, at: str = "a") -> Future[Any]:
        producer = (PushProducer if push else PullProducer)(transfer_id=name, pair=Pair(gen=1, attempt=1))
        kv = params_of(producer) | {"pdq_engine_request_id": f"p-{name}"}
        return self.call("generate", engine=at, request_id=f"p-{name}", ids=ids, kv=kv, max_tokens=1)

    def decode(self, name: str, ids: list[int], kv: dict[str, Any], *, at: str = "b", **sampling: Any) -> Future[Any]:
        kv = kv | {"pdq_engine_request_id": f"d-{name}"}
        options = {"max_tokens": MAX_TOKENS} | sampling
        return self.call("generate", engine=at, request_id=f"d-{name}", ids=ids, kv=kv, **options)

    def pushed_by(self, engine: str, name: str) -> dict[str, Any]:
        """KV params of a request that `engine` will write into."""
        source = KvSource(
            engine_id=engine,
            epoch=f"epoch-{engine}",
            host="127.0.0.1",
            port=self.ports[engine],
            tp_size=1,
            block_size=BLOCK_SIZE,
        )
        return params_of(PushConsumer(transfer_id=name, pair=Pair(gen=1, attempt=1), source=source))

    def through_both(self, ids: list[int], mode: str, *, at: str = "a", to: str = "b", **sampling: Any) -> Future[Any]:
        """D's answer."""
        name, push = self.new_name(), mode == "push"
        prefill = self.prefill(name, ids, push=push, at=at)
        kv = self.pushed_by(at, name) if push else prefill.result(LIMIT_S)["kv"]
        return self.decode(name, ids, kv, at=to, **sampling)

    def release(self, name: str, *, at: str = "a") -> None:
        kv = {"pdq_release": True, "pdq_engine_request_id": f"p-{name}"}
        self.ask("reject", engine=at, request_id=f"release-{name}", kv=kv)

    def news(self, engine: str) -> dict[str, Any]:
        return joined_news(self.ask("news", engine=engine))

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s; {self.news('a')}; {self.news('b')}"
            time.sleep(0.05)

    def wait_until_released(self, engine: str, outside_id: str) -> None:
        self.wait_for(f"release of {outside_id}", lambda: outside_id in self.news(engine).get("released", []))

    def wait_for_blocks(self, engine: str) -> None:
        """A prefill's first chunk has been computed; there are more."""
        self.wait_for("a computed chunk", lambda: self.ask("figures", engine=engine)["usage"] > 0)

    def wait_for_token(self, engine: str, *, after: float) -> None:
        """`after`: tokens that were generated before."""
        self.wait_for("a generated token", lambda: self.ask("figures", engine=engine)["tokens"] > after)

    def forget_prefixes(self, *, running: bool = False) -> None:
        for engine in ("a", "b"):
            self.ask("reset", engine=engine, running=running)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith('{"number"'):
                continue
            answer = json.loads(line)
            future = self._answers[answer["number"]]
            if "error" in answer:
                future.set_exception(RuntimeError(answer["error"]))
            else:
                future.set_result(answer["result"])
        for future in self._answers.values():
            if not future.done():
                future.set_exception(RuntimeError("the engines' process has ended"))
