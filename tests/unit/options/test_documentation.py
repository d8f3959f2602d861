"""What options do is written once, in docstrings, and the tables of the pages get it there."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.custom_loop import SyncOptions
from testing.processes.scripts import REPOSITORY

# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "docs")
        yield importlib.import_module("tables")


def test_tables_of_the_pages_are_current(tables: ModuleType) -> None:
    """Where this fails: ``python docs/tables.py``."""
    used = ""
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, page.name
        used += text
    assert [name for name in tables.TABLES if f" table: {name}" not in used] == []


def test_a_table_that_is_out_of_date_is_found(tables: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert "| `check_digest` |" in page
    changed = page.replace("| `check_digest` |", "| `check_digests` |")
    assert tables.filled(changed) == page


def test_the_key_reference_has_every_key(tables: ModuleType) -> None:
    from lowbit_strategy import OUTER_RULES, PRESETS

    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    configurations = [*PRESETS.values(), *OUTER_RULES.values(), LowBitPlugin(), SyncOptions()]
    keys = {field.name for each in configurations for field in dataclasses.fields(each)}
    assert [key for key in sorted(keys) if f"| `{key}` |" not in page] == []
