"""``second_moment=``: whether and how it is corrected."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowbit_strategy import leaves
from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.second_moment.few_bits import needs_squares
from lowbit_strategy.second_moment.mean_moment import MeanMoment, NotExchanged
from lowbit_strategy.second_moment.optimizers import check_second_moment, has_second_moment
from lowbit_strategy.second_moment.served import served
from lowbit_strategy.second_moment.squares import SecondMoment

_log = logging.getLogger("lowbit_strategy")


class SecondMomentOption(Part):
    """Whether to correct the second moment. None: if few bits need it, until an optimizer steps that is not like
    Adam.
    """

    def __init__(self, options: SyncOptions) -> None:
        self._options, self._chosen = options, options.second_moment

    def check_options(self, options: Any) -> None:
        if self._chosen and options.two_level:
            raise ValueError("second_moment=True is incompatible with two_level=True: leave one of them out")

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        if isinstance(compressor, Chooser) and self._chosen:
            raise ValueError(
                "Auto chooses among compressors that do not need second_moment: give one, such as LoCo(bits=1)"
            )

    def on_ranks(self, prepared: PreparedModel) -> PreparedModel:
        if self._chosen and prepared.topology.node_size is not None and not prepared.scatter:
            raise ValueError(
                "second_moment=True is incompatible with two levels, which these nodes have: give two_level=False, or"
                ' FSDP2 with shard_size="node"'
            )
        return prepared

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self._chosen:
            check_second_moment(optimizer, local_steps=self._options.outer is not None)

    def exchanges_squares(self, prepared: PreparedModel) -> bool:
        if prepared.options.outer is not None or self._chosen is not None:
            return prepared.options.outer is None and bool(self._chosen)
        one_level = prepared.scatter or prepared.topology.node_size is None
        return one_level and needs_squares(prepared.compressor, prepared.specs)  # if few bits need it

    def extra(self, prepared: PreparedModel) -> Any:
        """Exchanges and memory, for plans."""
        if not self.exchanges_squares(prepared):
            return NotExchanged().extra
        return leaves.load("lowbit_strategy.second_moment.planned:Squares", "a plan")(optional=self._chosen is None)

    def given_up(self) -> SecondMomentOption:
        """The replacement if the correction was not requested and does not fit."""
        return SecondMomentOption(replace(self._options, second_moment=False))

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        corrects_means = prepared.options.outer is not None and self._chosen
        of_means = MeanMoment(lambda: 1 if sync.rounds is None else sync.ranks.peers.world_size)
        sync.transactions.follow(of_means if corrects_means else NotExchanged())
        if not self.exchanges_squares(prepared):
            return
        if self._chosen is None:
            IfOfAdamsKind(sync, module)
            return
        if sync.ranks.logs and not served(sync.state.assignments):
            _log.warning(
                "second_moment=True corrects nothing: %s sends every gradient of this model exactly, or nearly so."
                " Leave it out, unless a controller changes the compressor",
                sync.compressor.name,
            )
        SecondMoment(sync, module)


class IfOfAdamsKind(SecondMoment):
    """``second_moment=None``: corrects Adam's second moment until an optimizer without one has stepped.

    Optimizers are known for certain only when they have stepped. Ranks exchange squares from the first backward pass
    on, as with ``second_moment=True``, so that nothing is missed, and all of them stop in the same step.
    """

    def correct_(self, optimizer: Optimizer) -> None:
        """Called when `optimizer` has stepped on reduced gradients."""
        if has_second_moment(optimizer):
            super().correct_(optimizer)
            return
        self.leave()
        if self._sync.ranks.logs:
            inform(
                "%s keeps no exp_avg_sq, or not as Adam does: ranks exchange no squares for it from now on"
                " (second_moment=False leaves it out from the start)",
                type(optimizer).__name__,
            )
