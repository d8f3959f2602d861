"""Whether an optimizer goes with a compressor that applies momentum itself."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch


def check_momentum(momenta: Collection[float], optimizer: torch.optim.Optimizer) -> None:
    """Momentum must be applied once: by the compressor or by the optimizer.

    Args:
        momenta: What the compressor applies, over all parameters and phases.
        optimizer: Any.

    Raises:
        ValueError: The compressor applies different momenta to different parameters or phases; or both apply one.
    """
    if not any(momenta):
        return
    if len(momenta) > 1:
        values = " and ".join(f"{momentum:g}" for momentum in sorted(momenta))
        raise ValueError(
            f"the compressor applies momentum {values} to different parameters or phases, so no setting of the"
            " optimizer is right for all of them: give DGC momentum=0 and leave momentum to the optimizer, or use DGC"
            " for all parameters with its own warm-up (warmup_steps) in place of WarmUp"
        )
    (momentum,) = momenta
    for number, group in enumerate(optimizer.param_groups):
        if group.get("momentum"):
            raise ValueError(
                f"momentum is applied twice: {momentum:g} by the compressor and {group['momentum']:g} by"
                f" {type(optimizer).__name__} (parameter group {number}); set the optimizer's momentum to 0, or the"
                " compressor's"
            )
    if any("betas" in group for group in optimizer.param_groups):
        warnings.warn(
            f"the compressor applies momentum {momentum:g} and {type(optimizer).__name__} averages gradients itself:"
            " gradients are smoothed twice. Give DGC momentum=0",
            stacklevel=3,
        )
