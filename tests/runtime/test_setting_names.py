"""The list of all settings' names is complete, so that a variable for some roles is no error in the others."""

from __future__ import annotations

from pathlib import Path

import decode_worker.main
import gateway.main
import prefill_worker.main
from pdq.cli.dead import DeadSettings
from pdq.cli.demo import DemoSettings
from pdq.cli.deployment_settings import DeploymentSettings
from pdq.cli.drain import DrainSettings
from pdq.cli.scale import ScaleSettings
from pdq.cli.status import StatusSettings
from pdq.cli.top import TopSettings
from pdq.runtime import setting_names
from pdq.runtime.setting_fields import settings_of
from pdq.runtime.setting_names import NAMES

PROCESSES = (
    gateway.main.Settings,
    prefill_worker.main.Settings,
    decode_worker.main.Settings,
    DeploymentSettings,
    DemoSettings,
    DeadSettings,
    DrainSettings,
    ScaleSettings,
    StatusSettings,
    TopSettings,
)


def test_the_list_has_every_setting_of_every_process_and_no_other() -> None:
    names = {setting.name for cls in PROCESSES for setting in settings_of(cls)}

    assert names == NAMES, "add or drop the names in pdq/runtime/setting_names.py"


def test_the_list_is_in_order_so_that_two_changes_seldom_meet() -> None:
    lines = Path(setting_names.__file__).read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.startswith("        ")]

    assert names == sorted(names)
