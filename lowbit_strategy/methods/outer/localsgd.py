"""Local SGD: ranks train by themselves, then take the mean of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer

from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.options.configuration import configuration


@configuration
class LocalSGD(OuterRule):
    """The mean of all ranks' weights after every round: ``anchor = anchor - mean(anchor - weights)``.

    With ``every=1``, an exact codec and plain SGD inside, this is synchronous training.

    Args:
        every, fragments, delay, mix, average_state: See `OuterRule`.
        synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.

    References:
        Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767.
    """

    name: ClassVar[str] = "localsgd"
    lr = 1.0  # of the outer SGD; both are options of rules that derive from this one
    momentum = 0.0

    @property
    def moment_nbytes(self) -> float:
        return 4.0 if self.momentum else 0.0

    def optimizer(self, anchors: Sequence[Tensor]) -> Optimizer:
        return SGD(anchors, lr=self.lr, momentum=self.momentum)
