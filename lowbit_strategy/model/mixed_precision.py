"""FSDP2's policy for a trainer's precision: the types that weights travel in and that gradients are reduced in."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """What a trainer with this `precision` does with parameters in float32 or, with ``-true``, in another type.

    ``bf16-mixed`` and ``16-mixed``: shards and optimizer states stay float32, weights are gathered and computed with in
    the half type. Without it FSDP2 would gather float32, and autocast would make, and keep for backward, a half copy of
    every weight. Gradients are handed to the compressor in float32: it codes them anyway, and the mean is then not
    rounded to the half type.

    Any other precision: everything in the parameters' own type.
    """
    if precision not in _COMPUTE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_COMPUTE[precision], reduce_dtype=torch.float32)


def needs_own_type(module: torch.nn.Module) -> bool:
    """Whether a module has to compute with parameters of the type of its running statistics."""
    return isinstance(module, _BatchNorm) and module.affine
