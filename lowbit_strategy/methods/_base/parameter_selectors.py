"""Choosing parameters: by name, by predicate, by function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from lowbit_strategy.methods._base.tensor_spec import TensorSpec

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
    ValueError: Not a sequence of names, known predicates and functions.
    """
    if isinstance(selectors, str) or not isinstance(selectors, Sequence):
        raise ValueError(f"{field} must be a tuple of names, predicates or functions, got {selectors!r}")
    for selector in selectors:
        if callable(selector):
            continue
        if not isinstance(selector, str):
            raise ValueError(f"{field}: {selector!r} is neither a name, a predicate nor a function")
        if selector.startswith("@") and selector not in _PREDICATES:
            near = get_close_matches(selector, _PREDICATES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
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
        return f"function {getattr(selector, '__name__', 'given')}"
    if selector in _PREDICATES:
        return _PREDICATES[selector][1]
    return f"name matches {selector}"
