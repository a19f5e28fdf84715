"""Starting vLLM in a thread: its reasons come out, and nothing keeps a worker that isn't wanted any more."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import threading

import pytest

from connector.layer_count import LayerCount
from engine.base import EngineError
from engine.vllm.child import FailureFile
from engine.vllm.launch import Plan, Started
from engine.vllm.processes import StartFault, VllmProcesses
from engine.vllm.shared_files import SharedFiles
from engine.vllm.side_channel_ports import SidePorts
from pdq.runtime.arguments import Arguments

PLAN = Plan(
    arguments=Arguments(),
    model_path="/models/x",
    max_model_len=0,
    kv_cache_bytes=0,
    cpu_kv_cache_bytes=1 << 20,
    tp_size=1,
    role="producer",
    kv_transfer=None,
)


class Llm:
    def __init__(self) -> None:
        self.shutdowns: list[float] = []

    def shutdown(self, timeout: float) -> None:
        self.shutdowns.append(timeout)


def started(llm: Llm) -> Started:
    return Started(
        llm=llm,
        new_sampling_params=dict,
        block_size=32,
        total_blocks=10,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=frozenset(),
        capabilities=(),
        fingerprint="",
    )


def processes(start, *, start_s: float = 60.0, files: SharedFiles | None = None) -> VllmProcesses:
    return VllmProcesses(
        PLAN, files or SharedFiles(), SidePorts("127.0.0.1", 1), start_s=start_s, stop_s=3.0, start=start
    )


async def test_the_start_blocks_a_thread_and_not_the_loop():
    llm, go_on = Llm(), threading.Event()

    def start(plan, report, check):
        report("loading")
        assert go_on.wait(60)
        return started(llm)

    running = processes(start)
    starting = asyncio.create_task(running.start())
    await asyncio.sleep(0)
    go_on.set()

    assert (await starting).llm is llm
    await running.stop()
    await running.stop()
    assert llm.shutdowns == [3.0]


def log_failures(files: SharedFiles, *errors: Exception) -> None:
    """As vLLM's processes do."""
    logger = logging.Logger("vllm's")
    logger.addHandler(FailureFile(files.failures_path))
    for error in errors:
        logger.error("failed to start", exc_info=error)


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (OSError(errno.EADDRINUSE, "port 20001 is taken"), EngineError),
        (ValueError("no such dtype"), EngineError),
        (MemoryError("64 GiB"), EngineError),
        (OSError(errno.EBADF, "our own descriptor"), StartFault),
        (AssertionError("our own mistake"), StartFault),
        (RuntimeError("our own mistake"), StartFault),
    ],
    ids=repr,
)
async def test_the_first_failure_of_vllms_own_processes_is_the_reason_and_says_whose_fault_it_is(first, kind):
    files = SharedFiles()

    def start(plan, report, check):
        log_failures(files, first, RuntimeError("initialization failed, see above"))
        raise RuntimeError("Engine core initialization failed")

    running = processes(start, files=files)

    with pytest.raises(kind, match=f"^vLLM didn't start: {re.escape(f'{type(first).__name__}: {first}')}$"):
        await running.start()
    assert not files.failures_path.parent.exists()


async def test_an_engine_core_that_ends_without_a_word_is_no_bad_configuration():
    def start(plan, report, check):
        raise RuntimeError("Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}")

    with pytest.raises(RuntimeError, match="-9"):
        await processes(start).start()


async def test_an_error_before_any_process_started_stands_for_itself():
    def start(plan, report, check):
        raise EngineError("--engine-args: unrecognized arguments: --blok-size")

    with pytest.raises(EngineError, match=r"^--engine-args: unrecognized arguments: --blok-size$"):
        await processes(start).start()


async def test_a_start_that_takes_too_long_is_given_up_with_the_settings_name():
    stopped = threading.Event()

    def start(plan, report, check):
        while True:
            try:
                check()
            except EngineError:
                stopped.set()
                raise

    with pytest.raises(EngineError, match="vllm_start_s"):
        await processes(start, start_s=0.05).start()
    assert stopped.is_set()


async def test_a_cancelled_start_ends_what_it_began():
    llm, began, go_on = Llm(), threading.Event(), threading.Event()

    def start(plan, report, check):
        began.set()
        assert go_on.wait(60)
        return started(llm)

    running = processes(start)
    starting = asyncio.create_task(running.start())
    await asyncio.to_thread(began.wait, 60)
    starting.cancel()
    await asyncio.sleep(0)
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await starting
    assert llm.shutdowns == [3.0]


async def test_stopping_what_never_started_frees_the_ports():
    ports = SidePorts("127.0.0.1", 1)
    running = VllmProcesses(PLAN, SharedFiles(), ports, start_s=1.0, stop_s=1.0, start=lambda *_: started(Llm()))

    await running.stop()

    SidePorts("127.0.0.1", 1, first=ports.first).close()


async def test_a_second_stop_waits_for_the_first_and_disturbs_nothing():
    llm, began, go_on = Llm(), threading.Event(), threading.Event()

    def start(plan, report, check):
        began.set()
        assert go_on.wait(60)
        return started(llm)

    running = processes(start)
    starting = asyncio.create_task(running.start())
    await asyncio.to_thread(began.wait, 60)
    first, second = asyncio.create_task(running.stop()), asyncio.create_task(running.stop())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not second.done()
    go_on.set()
    await asyncio.gather(first, second)

    assert llm.shutdowns == [3.0]
    assert (await starting).llm is llm


async def test_a_shutdown_that_fails_keeps_no_port_and_no_file():
    class Failing(Llm):
        def shutdown(self, timeout: float) -> None:
            raise RuntimeError("no such process")

    files, ports = SharedFiles(), SidePorts("127.0.0.1", 1)
    running = VllmProcesses(PLAN, files, ports, start_s=60.0, stop_s=1.0, start=lambda *_: started(Failing()))
    await running.start()

    with pytest.raises(RuntimeError, match="no such process"):
        await running.stop()

    SidePorts("127.0.0.1", 1, first=ports.first).close()
    assert not files.failures_path.parent.exists()


async def test_what_never_started_has_made_no_folder():
    files = SharedFiles()
    running = processes(lambda *_: started(Llm()), files=files)
    assert not files.failures_path.parent.exists()

    await running.start()
    assert files.layer_count_path.exists()
    await running.stop()
    assert not files.failures_path.parent.exists()


async def test_what_failed_after_the_start_is_told_when_it_is_asked_for():
    files = SharedFiles()
    files.create()
    assert files.failure("gone") == "gone"

    log_failures(files, RuntimeError("out of memory"))

    assert files.failure("gone") == "RuntimeError: out of memory"
    files.remove()


def test_layers_that_another_process_counts_are_read():
    files = SharedFiles()
    files.create()

    LayerCount(files.layer_count_path).add()

    assert files.num_layers == 1
    files.remove()
