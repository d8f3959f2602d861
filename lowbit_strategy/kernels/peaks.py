"""The largest magnitude of tensors. Results do not depend on the backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import function, isa, threads


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each tensor: infinity if it has inf or NaN, 0 if it is empty."""
    if not tensors or not is_native(tensors[0].device):
        return _in_torch(tensors)
    if set(map(attrgetter("dtype"), tensors)) == {torch.float32} and all(map(Tensor.is_contiguous, tensors)):
        return _in_c(tensors)
    return list(map(_of_any_form, tensors))


def _in_torch(tensors: Sequence[Tensor]) -> list[float]:
    """The definition, which waits for the device only once."""
    if not tensors:
        return []
    largest = torch._foreach_norm([x if x.numel() else x.new_zeros(1) for x in tensors], math.inf)
    return [math.inf if math.isnan(value) else value for value in torch.stack(largest).tolist()]


def _in_c(tensors: Sequence[Tensor]) -> list[float]:
    largest, name, found = function("lowbit_peak"), isa().encode(), []
    for x in tensors:
        work, numel = functools.partial(largest, name, x.data_ptr()), x.numel()
        found.append(work(0, numel) if numel < 2 * threads.GRAIN else max(threads.run_on_elements(work, numel)))
    return found


def _of_any_form(x: Tensor) -> float:
    rows = [x] if x.is_contiguous() else x.unbind()  # under reduce-scatter a bucket has a row for each rank
    if x.dtype == torch.float32 and all(map(Tensor.is_contiguous, rows)):
        return max(_in_c(rows))
    return _in_torch([x])[0]
