"""Mixed precision: FSDP2's policy for a trainer's precision, and what a loss scaler multiplies gradients by."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """FSDP2's policy for a trainer's `precision`.

    ``bf16-mixed`` and ``16-mixed``: shards and optimizer states stay float32, weights are gathered and used in half
    precision. Otherwise FSDP2 would gather float32, and autocast would keep a half copy of every weight for backward.
    The compressor gets float32 gradients: it codes them anyway, and their mean is not rounded to half precision.

    Any other precision: everything in the parameters' own type.
    """
    if precision not in _COMPUTE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=_COMPUTE[precision], reduce_dtype=torch.float32)


def needs_own_type(module: torch.nn.Module) -> bool:
    """Whether a module's parameters must have the type of its running statistics."""
    return isinstance(module, _BatchNorm) and module.affine


class LossScale:
    """The scale of the next gradients. Reading it waits for the device, so it is read once per step.

    Attributes:
        value: None without a scaler.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._is_new = False  # it was read for the next step

    def read(self, scaler: Any) -> None:
        """A step has ended: read the scale of the next one, if there is a scaler."""
        self._is_new = scaler is not None and scaler.is_enabled()
        if self._is_new:
            self.value = float(scaler.get_scale())

    def of_step(self, scaler: Any, *, begins: bool) -> float | None:
        """Before a backward pass; read now if this `begins` a step and it was not read at the end of the last one."""
        if begins and not self._is_new:
            self.read(scaler)
        self._is_new = False
        return self.value

    def forget(self) -> None:
        """The scaler has another scale now."""
        self._is_new = False
