"""Post-local SGD: synchronous at first, local steps later."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods.outer.localsgd import LocalSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class PostLocalSGD(LocalSGD):
    """Gradients are synchronised in each of the first steps, through the same compressor; local SGD goes on from there.

    Every rule has a synchronous part if it is asked for; this one has it by default.

    Args:
        synchronous: Optimizer steps of the synchronous part, at least 1, or a share of `num_steps`. More: closer to
            synchronous training, more bytes.
        synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.
        every, fragments, delay, mix, average_state: See `OuterRule`; of the local part.

    Raises:
        ValueError: A field is out of range.

    References:
        Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    name: ClassVar[str] = "postlocalsgd"

    synchronous: int | float = 1000

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not self.synchronous:
            raise ValueError("synchronous must be a positive integer, or a share of the run: without it use LocalSGD")
