"""Selectors choose parameters in a configuration, such as those that are exempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.options.conversion import did_you_mean

Selector = str | Callable[[TensorSpec], bool]

SMALL_NUMEL = 1024  # below this a tensor's scales and padding cost more than they save
_PREDICATES = {
    "@vector": "1-D or scalar",
    "@small": f"fewer than {SMALL_NUMEL} elements",
    "@embedding": "embedding",
    "@head": "output head",
}


def validate_selectors(field: str, selectors: Sequence[Selector]) -> None:
    """Raise a ValueError if a selector looks like a predicate but is not one."""
    for selector in selectors:
        if isinstance(selector, str) and selector.startswith("@") and selector not in _PREDICATES:
            hint = did_you_mean(selector, _PREDICATES)
            raise ValueError(f"{field}: unknown predicate {selector!r}, known: {', '.join(_PREDICATES)}{hint}")


def matching(selectors: Sequence[Selector], spec: TensorSpec) -> Selector | None:
    """The first selector that matches `spec`: a predicate, a name with wildcards or a function."""
    holds = {
        "@vector": len(spec.shape) < 2,
        "@small": math.prod(spec.shape) < SMALL_NUMEL,
        "@embedding": spec.role == "embedding",
        "@head": spec.role == "head",
    }
    for selector in selectors:
        if callable(selector):
            chosen = bool(selector(spec))
        else:
            chosen = holds[selector] if selector in holds else fnmatchcase(spec.name, selector)
        if chosen:
            return selector
    return None


def reason_of(selector: Selector) -> str:
    """The reason for which a selector chose a parameter, for reports."""
    if callable(selector):
        return getattr(selector, "label", None) or f"function {getattr(selector, '__name__', 'given')}"
    return _PREDICATES.get(selector) or f"name matches {selector}"
