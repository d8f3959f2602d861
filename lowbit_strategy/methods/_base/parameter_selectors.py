"""Choosing parameters: by name, by predicate, by function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.suggestions import did_you_mean

Selector = str | Callable[[TensorSpec], bool]

SMALL_NUMEL = 1024  # below this a tensor's scales and padding cost more than they save

_PREDICATES: dict[str, tuple[Callable[[TensorSpec], bool], str]] = {
    "@vector": (lambda spec: spec.ndim < 2, "1-D or scalar"),
    "@small": (lambda spec: spec.numel < SMALL_NUMEL, f"fewer than {SMALL_NUMEL} elements"),
    "@embedding": (lambda spec: spec.role == "embedding", "embedding"),
    "@head": (lambda spec: spec.role == "head", "output head"),
}


def validate_selectors(field: str, selectors: Sequence[Selector]) -> None:
    """Raises:
    ValueError: One looks like a predicate and is none.
    """
    for selector in selectors:
        if isinstance(selector, str) and selector.startswith("@") and selector not in _PREDICATES:
            hint = did_you_mean(selector, _PREDICATES)
            raise ValueError(f"{field}: unknown predicate {selector!r}, known: {', '.join(_PREDICATES)}{hint}")


def matches(selector: Selector, spec: TensorSpec) -> bool:
    if callable(selector):
        return bool(selector(spec))
    if selector in _PREDICATES:
        return _PREDICATES[selector][0](spec)
    return fnmatchcase(spec.name, selector)


def matching(selectors: Sequence[Selector], spec: TensorSpec) -> Selector | None:
    """The first selector that chooses `spec`."""
    return next((selector for selector in selectors if matches(selector, spec)), None)


def describe(selector: Selector) -> str:
    """Why a selector chose a parameter, for reports."""
    if callable(selector):
        return getattr(selector, "label", None) or f"function {getattr(selector, '__name__', 'given')}"
    if selector in _PREDICATES:
        return _PREDICATES[selector][1]
    return f"name matches {selector}"
