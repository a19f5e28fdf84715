"""Engines that share cores must not spin."""

from __future__ import annotations

import subprocess
import sys


def openmp_settings(*variables: str) -> str:
    """What OpenMP says about itself when torch loads it after the call."""
    code = "from engine.embedded.thread_wait import sleep_while_waiting as s; s(); import torch; torch.ones(9).sum()"
    command = ["env", "OMP_DISPLAY_ENV=true", *variables, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr


def test_torch_s_threads_sleep_while_they_wait():
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in openmp_settings()


def test_an_operator_s_own_choice_stands():
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in openmp_settings("OMP_WAIT_POLICY=active")
