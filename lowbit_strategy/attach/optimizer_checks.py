"""Optimizers and clipping that do not go together with a compressor: noticed when training starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.engine.second_moment import SecondMoment
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.mean_moment import check_decay, check_second_moment, has_second_moment

_log = logging.getLogger("lowbit_strategy")


def check_optimizers(compressor: Compressor, options: SyncOptions, optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    ValueError: An optimizer's momentum does not go with the compressor's, it has not what the options need, or it
        exchanges weights itself where steps are local.
    """
    for optimizer in optimizers:
        compressor.check_optimizer(optimizer)
        if options.outer is not None:
            check_keeps_weights(optimizer)
        if options.second_moment:
            check_second_moment(optimizer)
            if options.outer is not None:
                check_decay(optimizer)


def check_keeps_weights(optimizer: Any) -> None:
    """Steps are local: what ranks validate, save and end with are the anchors, which they share.

    Raises:
        ValueError: The optimizer, or one inside of it, puts other weights into the model for that: this rank's own.
    """
    inner: Any = optimizer
    while inner is not None:
        is_wrapper = type(inner).__module__.startswith("accelerate.")  # which has these methods for any optimizer
        if not is_wrapper and callable(getattr(inner, "train", None)) and callable(getattr(inner, "eval", None)):
            raise ValueError(
                f"{type(inner).__name__} exchanges the model's weights in its train() and eval(), for this rank's own"
                " average, and local steps (outer=) put in what all ranks share: they do not go together. Leave outer"
                " out, or take an optimizer that keeps one set of weights, such as AdamW (in place of"
                " optim='schedule_free_adamw')"
            )
        inner = getattr(inner, "optimizer", None)


def check_synchronises(model: DistributedDataParallel) -> None:
    """An optimizer has stepped on gradients that `model` was to synchronise.

    Raises:
        RuntimeError: It was told not to.
    """
    if not model.require_backward_grad_sync:
        raise RuntimeError(
            "an optimizer has stepped inside of no_sync(): each rank has trained on its own gradients, and nothing was"
            " sent or compressed. Leave no_sync() before the last backward pass of a step. If ranks are to train by"
            " themselves and meet every so many steps, as with Accelerate's LocalSGD, leave that out and give the"
            " strategy or the plugin outer=LocalSGD(every=8), of lowbit_strategy"
        )


class IfOfAdamsKind(SecondMoment):
    """Corrects Adam's second moment until an optimizer has stepped that has none: ``second_moment=None``.

    Which optimizers there are is known for certain when they have stepped. Ranks exchange squares from the first
    backward pass on, as with ``second_moment=True``, so that nothing is missed; all of them stop in the same step.
    """

    def correct_(self, optimizer: Optimizer) -> None:
        """It has stepped on what was reduced."""
        if has_second_moment(optimizer):
            super().correct_(optimizer)
            return
        self._sync.set_second_moment_correction(None)
        self._sync.unsubscribe(self)
        del self._sync.rank_state[self.name]
        if self._sync.ranks.rank == 0:
            inform(
                "%s keeps no exp_avg_sq, or not as Adam does: ranks exchange no squares for it from now on"
                " (second_moment=False leaves it out from the start)",
                type(optimizer).__name__,
            )


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
