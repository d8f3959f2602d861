"""Groups of parameters that are observed and judged together, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

GroupBy = Literal["kind", "module", "parameter"] | Callable[[str], str]


def group_of(name: str, by: GroupBy = "kind") -> str:
    """The group of a parameter.

    ``kind``: numbers in the name are ignored, so that the same layer of all blocks is one group
    (``blocks.3.mlp.weight`` -> ``blocks.*.mlp.weight``); ``module``: without the parameter's own name; ``parameter``:
    each parameter alone; or a function of the name.
    """
    if callable(by):
        return by(name)
    if by == "kind":
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    return name.rpartition(".")[0] or name if by == "module" else name


def grouped(names: Iterable[str], by: GroupBy) -> dict[str, list[str]]:
    """Names by group, in the order in which the groups first occur."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name, by), []).append(name)
    return groups
