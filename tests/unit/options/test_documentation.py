"""What options do is written once: the docstrings of all that take them, and the tables of the pages, get it there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from types import ModuleType
from typing import Any

import pytest

from lowbit_strategy import fabric, lightning, lightning_fabric, pytorch_lightning
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.custom_loop import SyncOptions
from lowbit_strategy.options.configuration import arguments, documented_options
from testing.processes.scripts import REPOSITORY

NAMESPACES = (lightning, pytorch_lightning, fabric, lightning_fabric)
STRATEGIES = [cls for each in NAMESPACES for cls in (each.LowBitDDPStrategy, each.LowBitFSDPStrategy)]


@pytest.mark.parametrize("cls", [*STRATEGIES, LowBitPlugin])
def test_every_docstring_has_every_option_of_synchronization_with_its_text(cls: Any) -> None:
    own, texts = arguments(cls), arguments(SyncOptions)
    taken = [field.name for field in dataclasses.fields(SyncOptions) if field.name in inspect.signature(cls).parameters]
    assert {"seed", "check_digest", "two_level", "outer"} <= set(taken)
    assert {name: own.get(name) for name in taken} == {name: texts[name] for name in taken}
    assert "@SyncOptions" not in cls.__doc__
    assert max(len(line) for line in cls.__doc__.splitlines()) <= 120


def test_a_docstring_s_own_text_goes_first() -> None:
    @dataclasses.dataclass
    class Source:
        """A source.

        Args:
            one: The first,
                in two lines.
            two, three: Both.

        Raises:
            ValueError: Never.
        """

        one: int = 1
        two: int = 2
        three: int = 3

    @documented_options(Source)
    class Taking:
        """What takes them.

        Args:
            own: Another one.
            @Source: one and three; filled in
                from there.
            two: Its own text.
        """

        def __init__(self, own: int, one: int, two: int) -> None:
            pass

    assert arguments(Source) == {"one": "The first, in two lines.", "two": "Both.", "three": "Both."}
    assert arguments(Taking) == {"own": "Another one.", "one": "The first, in two lines.", "two": "Its own text."}


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", REPOSITORY / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_the_pages_are_current(tables: ModuleType) -> None:
    """Where this fails: ``python docs/tables.py``."""
    used = ""
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, page.name
        used += text
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in used] == []


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
    in_code_only = {"rollback"}
    assert [key for key in sorted(keys - in_code_only) if f"| `{key}` |" not in page] == []
