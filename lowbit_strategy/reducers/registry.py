"""Every compressor by name, with its presets: what strategy names, configuration files and the command line use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from lowbit_strategy.reducers.base import Compressor
from lowbit_strategy.reducers.dense import Dense
from lowbit_strategy.reducers.loco import LoCo
from lowbit_strategy.reducers.topk import TopK

PRESETS: dict[str, Compressor] = {
    "dense": Dense(),
    "loco": LoCo(),
    "topk": TopK(),
}


def preset(name: str) -> Compressor:
    """The preset called `name`.

    Raises:
        ValueError: There is none; the message has the nearest name.
    """
    key = name.lower()
    if key not in PRESETS:
        near = get_close_matches(key, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown compressor {name!r}{hint} Known: {', '.join(sorted(PRESETS))}")
    return PRESETS[key]


def from_options(name: str, options: Mapping[str, Any]) -> Compressor:
    """The preset called `name` with `options` changed, as configuration files write it.

    Raises:
        ValueError: Unknown name or option, or an option out of range.
    """
    base = preset(name)
    known = [field.name for field in dataclasses.fields(base)]
    for key in options:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} has no option {key!r}{hint} Known: {', '.join(known)}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return dataclasses.replace(base, **values)
