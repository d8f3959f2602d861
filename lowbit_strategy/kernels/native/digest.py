"""Digests in C: same numbers as `lowbit_strategy.kernels.reference.digest`."""

from __future__ import annotations

from torch import Tensor

from lowbit_strategy.kernels.native import function, isa
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.reference.digest import FACTOR, weights

_MODULUS = 1 << 64


def digest(x: Tensor) -> int:
    """As a signed number."""
    x = x.detach().contiguous()
    place_weights, nbytes = weights(x.device), x.numel() * x.element_size()
    part, summed = 8 * place_weights.numel(), function("lowbit_digest")
    name = isa().encode()

    def work(first: int, last: int) -> tuple[int, int]:
        span = first * part, min(last * part, nbytes)
        total = summed(name, x.data_ptr(), *span, place_weights.data_ptr(), place_weights.numel(), FACTOR)
        return last - first, int(total)

    total = 0
    for num_parts, sum_of_parts in run(work, -(-nbytes // part), place_weights.numel()):
        total = (total * pow(FACTOR, num_parts, _MODULUS) + sum_of_parts) % _MODULUS
    return total - _MODULUS * (total >= _MODULUS // 2)
