"""Parameters of a model when only its size is known."""

from __future__ import annotations

from collections.abc import Iterable

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.plan.weights import ModuleLayout

_VOCABULARY = 32_000
_HEAD = 128  # of attention: the width is a multiple of it, and a layer deep per head
_PER_LAYER = 12  # matrices of width x width: four of attention, eight of the feed-forward part


def transformer(num_params: float) -> list[TensorSpec]:
    """A decoder of about `num_params` parameters: as deep as it has heads of 128, embedding and head not tied.

    Raises:
        ValueError: Fewer than a model of one head would have.
    """
    width = _HEAD
    while _numel(width + _HEAD) <= num_params:
        width += _HEAD
    if _numel(width) > 4 * num_params:
        raise ValueError(f"{num_params:g} parameters are fewer than a transformer of one head has: give a model")
    layers = max(1, round((num_params - 2 * _VOCABULARY * width) / (_PER_LAYER * width * width)))
    specs = [TensorSpec("embedding.weight", (_VOCABULARY, width), role="embedding")]
    for layer in range(layers):
        prefix = f"layers.{layer}"
        specs += [TensorSpec(f"{prefix}.attention.{name}.weight", (width, width)) for name in ("q", "k", "v", "o")]
        specs.append(TensorSpec(f"{prefix}.mlp.up.weight", (4 * width, width)))
        specs.append(TensorSpec(f"{prefix}.mlp.down.weight", (width, 4 * width)))
        specs += [TensorSpec(f"{prefix}.{name}.weight", (width,)) for name in ("norm1", "norm2")]
    return [*specs, TensorSpec("norm.weight", (width,)), TensorSpec("head.weight", (_VOCABULARY, width), role="head")]


def _numel(width: int) -> int:
    return _PER_LAYER * width**3 // _HEAD + 2 * _VOCABULARY * width


def layers_of(specs: Iterable[TensorSpec], itemsize: int) -> dict[str, ModuleLayout]:
    """What is usually sharded as one: what has the first number in its names in common; the rest as one."""
    import torch

    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts = spec.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        modules.setdefault("root" if at is None else ".".join(parts[: at + 1]), []).append(spec)
    gathers = {"root": 1}  # FSDP2 keeps the outermost module's weights from forward to backward
    return {
        name: ModuleLayout(specs=tuple(members), dtype=dtype, num_gathers=gathers.get(name, 2))
        for name, members in modules.items()
    }
