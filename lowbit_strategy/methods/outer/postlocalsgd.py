"""Post-local SGD: synchronous at first, local steps later."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods.outer.localsgd import LocalSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class PostLocalSGD(LocalSGD):
    """Gradients are synchronised in each of the first steps, through the same compressor; local SGD goes on from there.

    At the start of training weights move fastest, and ranks that train alone drift furthest apart. What the compressor
    still holds of gradients is dropped at the change: it is in other units than pseudo-gradients.

    Args:
        synchronous: Optimizer steps of the synchronous part. More: closer to synchronous training, more bytes.
        every, fragments, delay, mix: See `OuterRule`; of the local part.

    Raises:
        ValueError: A field is out of range.

    References:
        Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    name: ClassVar[str] = "postlocalsgd"

    synchronous: int = 1000

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        check_positive("synchronous", self.synchronous)

    @property
    def synchronous_steps(self) -> int:
        return self.synchronous
