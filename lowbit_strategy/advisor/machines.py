"""Reads what machines' makers publish: `machines.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit_strategy.options.conversion import did_you_mean


def find_machine(name: str) -> Mapping[str, Any]:
    """A machine's published figures: a row of `machines.json`.

    Raises:
        ValueError: There is none of that name.
    """
    table: dict[str, Any] = json.loads(Path(__file__).with_name("machines.json").read_text("utf-8"))
    if name.lower() not in table:
        raise ValueError(f"--machine {name!r} is not known{did_you_mean(name, table)} Known: {', '.join(table)}")
    found: Mapping[str, Any] = table[name.lower()]
    return found
