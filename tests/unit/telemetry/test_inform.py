"""Importing the package leaves logging alone, and yet everyone sees the start-up report."""

from __future__ import annotations

import logging

import pytest

from lowbit_strategy.telemetry.inform import inform
from tests.scripts import run_script

IMPORT = """
import logging
import lowbit_strategy
log = logging.getLogger("lowbit_strategy")
print(log.handlers, log.level, log.propagate, logging.getLogger().handlers)
"""

INFORM = """
import logging
import lowbit_strategy
{set_up}
from lowbit_strategy.telemetry.inform import inform
inform("%d parameters", 3)
"""


def test_importing_changes_nothing_about_logging() -> None:
    assert run_script(["-c", IMPORT]).stdout == "[] 0 True []\n"


@pytest.mark.parametrize(
    ("set_up", "shown"),
    [
        ("", "3 parameters\n"),
        ("logging.basicConfig(level=logging.INFO)", "INFO:lowbit_strategy:3 parameters\n"),
        ("logging.basicConfig()", ""),
        ("logging.getLogger('lowbit_strategy').setLevel(logging.WARNING)", ""),
    ],
)
def test_only_a_set_up_of_logging_decides_otherwise(set_up: str, shown: str) -> None:
    assert run_script(["-c", INFORM.format(set_up=set_up)]).stderr == shown


def test_handlers_get_the_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lowbit_strategy"):
        inform("%d parameters", 3)
    assert caplog.messages == ["3 parameters"]
