"""The parameters of one sharded module, which FSDP2 gathers together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleLayout:
    """The parameters that one sharded module gathers together.

    Args:
        specs: Its parameters, in the order of their shards in a row.
        dtype: Dtype of the gathered weights.
        num_gathers: Number of gathers by FSDP2 in a step of one forward and one backward pass.
        coded: Whether they can be coded: not if a parameter has a dtype that is not float, or customizes its
            all-gather.
    """

    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    num_gathers: int
    coded: bool = True

    def has_codes(self, coding: WeightCoding) -> bool:
        """Whether its weights are sent as codes; if not, FSDP2 gathers them, or rows are sent uncoded."""
        return self.coded and not isinstance(coding, Exact)
