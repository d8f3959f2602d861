"""ExDyna: exclusive partitions that move with the load, and a threshold that follows the count."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.exclusive_partitions import ExclusiveReducer
from lowbit_strategy.methods._sparse_base.sparse_compressor import SparseCompressor
from lowbit_strategy.options.configuration import configuration


@configuration
class ExDyna(SparseCompressor):
    """Sparsification without sorting and without build-up: the ranks never choose the same position.

    The accumulated gradient ``h = g + e`` of the whole model (under FSDP2: of each module) is cut into 1024 blocks of
    a multiple of 32 elements, contiguous blocks form W partitions. In step t, on every rank r:

    1. ``h = g + e``
    2. the threshold t follows the last step's count, ``r`` times the wanted one:
       ``drift += 0.003 ln r; ln t += 0.02 ln r + drift``
    3. ``|h| >= t`` in partition ``(step + rank) mod W`` only
    4. all ranks get all positions, and each contributes its own ``h`` there; ``e' = h``, 0 there
    5. between neighbouring partitions, one with more than 1.05 and one with less than 0.952 times the mean load, a
       block changes sides; no partition falls below a quarter of an equal share

    Where the authors' rules would take hundreds of steps, others are used. Theirs moves the threshold by 0.5 % a step
    from a start of ``1 / (2 * sqrt(k))``; here it is estimated from a sample of what the ranks are about to choose
    from, at the start, while such estimates move by more than 3 % per step, and whenever the count is further than a
    factor of 1.1 from the target. Theirs moves partitions by one block per step; here they are cut anew where a load is
    more than a tenth above the mean. Loads are counts averaged over some steps. Where more than four times the wanted
    number reach the threshold, only the largest are sent.

    Args:
        density: Share of the model's elements that is sent, in (0, 1].
        values: See `TopK`; the owner's rounding error stays in the owner's residual.
        residual, exempt, high_precision: See `TopK`.

    Raises:
        ValueError: A field is out of range.

    References:
        Yoon & Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
        2024, arXiv 2402.13781.
    """

    name: ClassVar[str] = "exdyna"

    def reducer(self, spec: TensorSpec) -> Reducer:
        return ExclusiveReducer(density=self.density, codec=self.codec, adjust=True)
