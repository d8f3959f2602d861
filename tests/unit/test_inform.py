"""Importing the package leaves logging alone, and yet everyone sees the start-up report."""

from __future__ import annotations

import logging

import pytest

from lowbit_strategy.inform import inform
from testing.processes.scripts import run_script

IMPORT = """
import logging
import lowbit_strategy
log = logging.getLogger("lowbit_strategy")
print(log.handlers, log.level, log.propagate, logging.getLogger().handlers)
"""

# Each set-up in a fork of a process that has imported the package.
INFORM = """
import logging, os, sys
import lowbit_strategy
from lowbit_strategy.inform import inform
for set_up in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(set_up)
        inform("%d parameters", 3)
        os._exit(0)
    os.waitpid(child, 0)
    print("--", file=sys.stderr, flush=True)
"""


def test_importing_changes_nothing_about_logging() -> None:
    assert run_script(["-c", IMPORT]).stdout == "[] 0 True []\n"


def test_only_a_set_up_of_logging_decides_otherwise() -> None:
    shown = {
        "": "3 parameters\n",
        "logging.basicConfig(level=logging.INFO)": "INFO:lowbit_strategy:3 parameters\n",
        "logging.basicConfig()": "",
        "logging.getLogger('lowbit_strategy').setLevel(logging.WARNING)": "",
    }
    assert run_script(["-c", INFORM, *shown]).stderr == "".join(f"{text}--\n" for text in shown.values())


def test_handlers_get_the_record(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lowbit_strategy"):
        inform("%d parameters", 3)
    assert caplog.messages == ["3 parameters"]


def test_a_bare_warning_names_the_package() -> None:
    calls = "_log.warning('%d ranks', 2); _log.warning('lowbit_strategy: 3')"
    shown = run_script(["-c", f"from lowbit_strategy.inform import _log; {calls}"]).stderr
    assert shown.splitlines()[-2:] == ["lowbit_strategy: 2 ranks", "lowbit_strategy: 3"]
