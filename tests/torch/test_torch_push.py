"""A tiny model pushed layer by layer from one core to another: the decoding side answers as `generate` does."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.settings import ConnectorSettings
from engine.base import PushKv, ReceiveKv
from engine.embedded.settings import EngineSettings
from engine.embedded.torch_runner import TorchRunner
from tests.engine.drive import Bench, request
from tests.torch.stepping import Blocks, generate
from tests.torch.test_torch_runner import random_prompts, reference

PROMPTS = random_prompts(6, seed=4)


@pytest.mark.parametrize("num_batched", [64, 7], ids=["whole", "chunked"])
def test_d_continues_what_p_pushed_as_generate_does(tiny_dir, num_batched: int):
    settings = EngineSettings(
        engine="torch", model_path=str(tiny_dir), num_blocks=64, block_size=4, max_num_batched_tokens=64, max_num_seqs=7
    )
    fabric, progress = MemoryFabric(), threading.Event()
    p, d = (
        Bench(
            replace(settings, max_num_batched_tokens=budget),
            connector=ConnectorSettings(kv_lease_s=90.0, kv_wait_s=90.0, kv_answer_tries=120),
            transport=lambda _: MemoryTransport(fabric),
            role=role,
            on_progress=progress.set,
            mode="push",
        )
        for role, budget in (("producer", num_batched), ("consumer", 64))
    )
    try:
        for index, prompt in enumerate(PROMPTS):
            options = {"max_tokens": 8, "temperature": 0.0}
            d.submit(request(f"r{index}", prompt, kv=ReceiveKv(source=p.info.kv_source), **options))
            p.submit(request(f"r{index}", prompt, kv=PushKv(), **options))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            progress.clear()
            p.step()
            d.step()
            if all(d.answers[f"r{index}"].end is not None for index in range(len(PROMPTS))):
                break
            if not (p.core.is_busy or d.core.is_busy):
                progress.wait(0.01)
    finally:
        d.core.close()
        p.core.close()

    found = [d.answers[f"r{index}"] for index in range(len(PROMPTS))]
    assert [answer.end.error for answer in found] == [None] * len(PROMPTS)
    expected = reference(tiny_dir, PROMPTS, 8)
    assert [answer.ids for answer in found] == expected
    longest = max(range(len(PROMPTS)), key=lambda index: len(PROMPTS[index]))
    assert found[longest].end.transfer.num_descriptors >= p.runner.num_layers


def test_layer_major_memory_gives_the_same_tokens(tiny_dir):
    runner = TorchRunner(tiny_dir, is_layer_major=True)
    regions = runner.allocate(64, 4)

    found = generate(runner, Blocks(64, 4), PROMPTS, 8, concurrency=4, rng=random.Random(1))

    assert found == reference(tiny_dir, PROMPTS, 8)
    assert len(regions) == runner.num_layers
    assert regions[1].base_address - regions[0].base_address == 64 * regions[0].block_stride_bytes
    runner.close()
