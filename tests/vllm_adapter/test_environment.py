"""The environment of vLLM's processes, their failures and their end."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq

from engine.base import EngineError
from engine.vllm.child import Failure, FailureFile, read_failures
from engine.vllm.environment import CHILD_VARIABLE, Child, defaults, plugins_with_ours
from engine.vllm.settings import VllmSettings
from engine.vllm.side_channel_ports import SidePorts
from pdq.runtime.settings import environment

CHILD = Child(failures_path="/nowhere", log_level="info", log_json=True, role="decode", worker_id="w1")


def test_a_child_learns_whose_it_is_from_one_variable():
    assert Child.from_text(CHILD.to_text()) == CHILD


def test_threads_are_left_to_vllm_unless_somebody_decided():
    settings = VllmSettings(vllm_start_s=90.5)

    assert "OMP_NUM_THREADS" not in defaults(settings, host="127.0.0.1", threads=0)
    values = defaults(settings, host="[::1]", threads=3)
    assert (values["OMP_NUM_THREADS"], values["VLLM_HOST_IP"], values["VLLM_ENGINE_READY_TIMEOUT_S"]) == (
        *("3", "::1"),
        "90",
    )


def test_a_list_of_allowed_plugins_gets_ours_added():
    assert plugins_with_ours(None) == {}
    assert plugins_with_ours("lora, pdq") == {"VLLM_PLUGINS": "lora,pdq,pdq_child"}


def test_what_vllms_processes_logged_as_exceptions_is_kept_once_each_in_order(tmp_path: Path):
    path = tmp_path / "failures"
    logger = logging.getLogger("test.failures")
    logger.propagate = False
    logger.addHandler(FailureFile(path))
    for error in (ValueError("no such port"), RuntimeError("see above"), RuntimeError("see above")):
        try:
            raise error
        except (ValueError, RuntimeError):
            logger.exception("failed to start")
    logger.error("an error without an exception")

    assert read_failures(path) == [
        Failure("ValueError: no such port", is_refusal=True),
        Failure("RuntimeError: see above", is_refusal=False),
    ]
    assert read_failures(tmp_path / "none") == []


@pytest.mark.parametrize("broken", [b'{"text": "Val', b'{"text": "\xff", "is_refusal": true}', b"3", b"{}"], ids=repr)
def test_a_line_that_is_broken_hides_no_other(tmp_path: Path, broken: bytes):
    path = tmp_path / "failures"
    path.write_bytes(broken + b'\n{"text": "RuntimeError: no memory", "is_refusal": false}\n')

    assert read_failures(path) == [Failure("RuntimeError: no memory", is_refusal=False)]


PARENT = """
import multiprocessing, signal, time
from engine.vllm import child

def work(connection):
    child.register()
    child.register()
    connection.send(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
    time.sleep(300)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    print(process.pid, ours.recv(), flush=True)
    time.sleep(300)
"""


def test_a_process_of_vllm_leaves_interrupts_to_its_worker_and_dies_with_it(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environ = {**environment(), CHILD_VARIABLE: CHILD.to_text(), "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, ignores_interrupts = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        try:
            parent.send_signal(signal.SIGKILL)

            gone, _ = psutil.wait_procs([child], timeout=60)
        finally:
            if child.is_running():
                child.kill()

    assert gone == [child]
    assert ignores_interrupts == "True"


def test_kept_ports_are_free_for_zeromq_and_nobody_else_is_given_one():
    ports = SidePorts("127.0.0.1", 2)
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports.first))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as first, context.socket(zmq.ROUTER) as second:
            first.bind(f"tcp://127.0.0.1:{ports.first}")
            second.bind(f"tcp://127.0.0.1:{ports.first + 1}")
    finally:
        ports.close()


def test_a_taken_side_channel_port_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(EngineError, match=f"{port} to {port + 1} .*--side-channel-port"):
            SidePorts("127.0.0.1", 2, first=port)


def test_an_address_of_another_machine_can_not_be_listened_on():
    with pytest.raises(EngineError, match=r"192\.0\.2\.1 .*--side-channel-host"):
        SidePorts("192.0.2.1", 1)
