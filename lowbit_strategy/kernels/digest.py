"""Digests of tensors' bits. The public op; results do not depend on the backend, but on the type of device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import digest as native
from lowbit_strategy.kernels.reference import digest as reference


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64 ``[tensors]`` on `device`, of each one's bits in the order of elements, not of memory; any dtypes.

    One changed 64-bit word always changes it; other differences cancel about once in 2^64 cases.
    """
    if all(is_native(x.device) for x in tensors):
        return torch.tensor([native.digest(x) for x in tensors], dtype=torch.int64, device=device)
    found = [reference.digest(x).to(device).view(1) for x in tensors]
    return found[0] if len(found) == 1 else torch.cat(found)
