"""Streaming DiLoCo: fragments that travel at 2 bits while training goes on."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.outer.diloco import DiLoCo
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.options.configuration import configuration


@configuration
class StreamingDiLoCo(DiLoCo):
    """`DiLoCo` with fragments, a delay and mixing; pseudo-gradients have 2 bits unless another compressor is given.

    Args:
        fragments, delay, mix, average_state: See `OuterRule`.
        synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.
        every, lr, momentum, nesterov, optimizer_class, decay: See `DiLoCo`.

    Raises:
        ValueError: A field is out of range.

    References:
        Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv 2501.18512 (4 bits in the
        E3M0 format there; 2 fitted bits with error feedback here).
    """

    name: ClassVar[str] = "streamingdiloco"

    fragments: int = 4
    delay: int = 5
    mix: float = 0.5

    def compressor(self) -> Compressor:
        return LoCo(bits=2, codebook="fitted", block_size=64, beta=0.0, reset_steps=None)
