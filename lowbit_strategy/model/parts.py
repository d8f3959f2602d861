"""What a rank holds of a tensor, and its elements in the order of buckets."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from lowbit_strategy.methods._base.tensor_spec import TensorSpec


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def flat_part(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The same, flat, with its elements as gradients and residuals have them."""
    part = local_part(tensor)
    return (part if spec.memory_order is None else part.permute(spec.memory_order)).reshape(-1)


def shaped(part_N: Tensor, spec: TensorSpec) -> Tensor:
    """The reverse: flat elements of a parameter, or of this rank's part of it, in its shape."""
    if spec.memory_order is None:
        return part_N.view(spec.shape)
    values = part_N.view([spec.shape[dim] for dim in spec.memory_order])
    return values.permute([spec.memory_order.index(dim) for dim in range(spec.ndim)])
