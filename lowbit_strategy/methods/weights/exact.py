"""Weights as they are."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.options.configuration import configuration


@configuration
class Exact(WeightCoding):
    """Weights travel as FSDP2 sends them: every element in the type that the forward runs in.

    Args:
        keep: ``nothing``: gathered in forward and again in backward, of every micro-batch, as FSDP2 does by itself.
            ``replica``: gathered once per optimizer step and kept until the next one: half the bytes, fewer still with
            gradient accumulation, for a whole copy of the weights on every rank.

    Raises:
        ValueError: There are no codes to keep.
    """

    name: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        if self.keep == "codes":
            raise ValueError("exact weights have no codes to keep: keep must be 'nothing' or 'replica', got 'codes'")

    @property
    def label(self) -> str:
        return "exact"

    def codec(self, spec: TensorSpec) -> Codec | None:
        return None
