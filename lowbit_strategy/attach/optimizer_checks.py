"""Optimizers and clipping that do not go together with a compressor: noticed when training starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch.optim import Optimizer

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.mean_moment import check_decay, check_second_moment

_log = logging.getLogger("lowbit_strategy")


def check_optimizers(compressor: Compressor, options: SyncOptions, optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    ValueError: An optimizer's momentum does not go with the compressor's, or it has not what the options need.
    """
    for optimizer in optimizers:
        compressor.check_optimizer(optimizer)
        if options.second_moment:
            check_second_moment(optimizer)
            if options.outer is not None:
                check_decay(optimizer)


class ClippingWarning:
    """Clipping takes away what a sparse method has sent: it has left the residual already. Logged once.

    Args:
        compressor: In use.
        speaks: Whether this rank logs.
    """

    def __init__(self, compressor: Compressor, *, speaks: bool) -> None:
        self._waits = speaks and compressor.is_sparse

    def clipped(self, clip: float | None, option: str) -> None:
        """Gradients are, or will be, clipped at `clip`; None and 0: they are not."""
        if clip and self._waits:
            self._waits = False
            _log.warning(
                "%s=%s clips the sparse mean gradient after it has left the residual, so what is clipped away is lost:"
                " raise it, or clip before compression (DGC(clip_norm=...))",
                option,
                clip,
            )
