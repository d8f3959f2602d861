"""Finds patterns of a configuration that match no parameter of the model."""

from __future__ import annotations

import dataclasses
import itertools

from torch import nn

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.inform import listed
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.selectors import Selector, matching
from lowbit_strategy.model.parameters import named_parameters

_SELECTOR_FIELDS = ("exempt", "high_precision")


def unmatched_patterns(compressor: Compressor, module: nn.Module) -> list[str]:
    """One sentence for each pattern that matches no parameter, trained or frozen. Predicates may match nothing."""
    patterns = [each for each in _selectors(compressor) if isinstance(each[1], str) and not each[1].startswith("@")]
    if not patterns:
        return []
    specs = [TensorSpec(name, tuple(param.shape)) for name, param in named_parameters(module)]
    names = listed([spec.name for spec in specs], 4)
    unmatched: dict[str, None] = {}  # used as an ordered set
    for field, selector in patterns:
        if all(matching([selector], spec) is None for spec in specs):
            sentence = f"{field}: {selector!r} matches no parameter of the model. Its parameters are {names}"
            unmatched[sentence] = None
    return list(unmatched)


def _selectors(compressor: Compressor) -> list[tuple[str, Selector]]:
    """All selectors of a configuration and of the configurations inside it."""
    found: list[tuple[str, Selector]] = []
    waiting: list[object] = [compressor]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Compressor):
            options = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            for field in _SELECTOR_FIELDS:
                found += zip(itertools.repeat(field), options.pop(field, ()))
            waiting[:0] = options.values()
        elif isinstance(value, tuple):
            if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Compressor):  # a Partition's rule
                found.append(("rules", value[0]))
            waiting[:0] = value
    return found
