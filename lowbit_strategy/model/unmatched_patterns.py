"""Patterns of a configuration that match no parameter: most often a name that was mistyped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.parameter_selectors import Selector, matches
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import canonical_name

_FIELDS = ("exempt", "high_precision")


def unmatched_patterns(compressor: Compressor, module: nn.Module) -> list[str]:
    """One sentence for each pattern that matches no parameter, trained or frozen. Predicates may match nothing."""
    specs = [TensorSpec(canonical_name(name), tuple(param.shape)) for name, param in module.named_parameters()]
    unmatched: dict[str, None] = {}  # in order, each once
    for field, selector in _selectors(compressor):
        is_pattern = isinstance(selector, str) and not selector.startswith("@")
        if is_pattern and not any(matches(selector, spec) for spec in specs):
            sentence = f"{field}: {selector!r} matches no parameter of the model. Its parameters are {_some(specs)}"
            unmatched[sentence] = None
    return list(unmatched)


def _selectors(value: object) -> Iterator[tuple[str, Selector]]:
    """All selectors of a configuration and of those inside it."""
    if isinstance(value, Compressor):
        for field in _FIELDS:
            for selector in getattr(value, field):
                yield field, selector
        for each in dataclasses.fields(value):
            if each.name not in _FIELDS:
                yield from _selectors(getattr(value, each.name))
    elif isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Compressor):  # a rule of Partition
            yield "rules", value[0]
        for entry in value:
            yield from _selectors(entry)


def _some(specs: Sequence[TensorSpec]) -> str:
    names = [spec.name for spec in specs]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])}, ..., {names[-1]}"
