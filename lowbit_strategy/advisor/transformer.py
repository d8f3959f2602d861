"""The parameters of a transformer of which nothing but its size is known."""

from __future__ import annotations

from lowbit_strategy.collectives.layout import TensorSpec

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
