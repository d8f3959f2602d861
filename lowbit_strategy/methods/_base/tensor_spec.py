"""What a method knows about a parameter, and choosing parameters by name, predicate or function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from lowbit_strategy.collectives.layout import Cut, Part, dim0_cut, flat_cut, part_of
from lowbit_strategy.options.conversion import did_you_mean

Role = Literal["embedding", "head", "other"]
MemoryOrder = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter: its name in the model, unsharded shape, what it is for, and how its elements lie in memory.

    Args:
        name: What the model calls it.
        shape: Unsharded.
        role: What it is for.
        memory_order: Dims from the outermost in memory to the innermost, as of ``channels_last``; None: in order. Flat
            gradients and residuals have their elements in this order.
        part: Where it lies in the parameter, if `shape` is that of a part only.
        sharded: FSDP2 shards it over the ranks that reduce it: each gets the sum of its own rows (reduce-scatter).
            Otherwise all get the mean (all-reduce).
    """

    name: str
    shape: tuple[int, ...]
    role: Role = "other"
    memory_order: MemoryOrder = None
    part: Part | None = None
    sharded: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements of the parameter that this is a part of, or of itself."""
        return math.prod(self.shape if self.part is None else self.part.shape)

    @property
    def whole(self) -> TensorSpec:
        """The parameter that this is a part of, or itself."""
        return self if self.part is None else replace(self, shape=self.part.shape, part=None)

    def part_for(self, index: int, count: int, num_peers: int) -> TensorSpec:
        """The part that number `index` of the `count` ranks of a node reduces with its `num_peers`, itself included."""
        row_dim = self.memory_order[0] if self.memory_order else 0
        shape, part = part_of(self.shape, row_dim, index, count, num_peers if self.sharded else None)
        return replace(self, shape=shape, part=part)

    def cut(self, world_size: int, block_size: int) -> Cut:
        """How it is cut over the ranks that reduce it."""
        if not self.sharded:
            return flat_cut(self.numel, world_size, block_size)
        row_numel = None if self.part is None else self.part.row_numel
        if row_numel is not None and row_numel * world_size >= self.numel:  # not where a rank tries alone
            return Cut(self.numel, row_numel, world_size)
        return dim0_cut(self.shape, world_size)


# Stands for a model's parameters where none is known yet. Big enough that headers and padding do not matter, and a
# matrix, so that low-rank methods compress it.
REFERENCE = TensorSpec("reference.weight", (1024, 1024))


def in_memory_order(values_N: Tensor, shape: Sequence[int], source: MemoryOrder, target: MemoryOrder) -> Tensor:
    """Flat values of a parameter of `shape`, brought from one memory order into another."""
    if source == target:
        return values_N
    dims = range(len(shape))
    source, target = tuple(dims) if source is None else source, tuple(dims) if target is None else target
    values = values_N.view([shape[dim] for dim in source])
    return values.permute([source.index(dim) for dim in target]).reshape(-1)


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
    for selector in selectors:
        if matches(selector, spec):
            return selector
    return None


def describe(selector: Selector) -> str:
    """Why a selector chose a parameter, for reports."""
    if callable(selector):
        return getattr(selector, "label", None) or f"function {getattr(selector, '__name__', 'given')}"
    if selector in _PREDICATES:
        return _PREDICATES[selector][1]
    return f"name matches {selector}"
