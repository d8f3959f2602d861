"""Tracks reduced gradients: an optimizer steps on them, or they are cleared without a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.delivered_signs import DeliveredSigns
from lowbit_strategy.attach.frozen import Frozen
from lowbit_strategy.attach.optimizer_hook import has_rate
from lowbit_strategy.engine.backward_pass import in_backward
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.learning_rates import LearningRates
from lowbit_strategy.model.parameters import local_part, named_parameters, shard_records


class GradientUse(LearningRates):
    """Commits and rolls back the reductions of one model's parameters, by their ``.grad``.

    A gradient that is gone when the next backward pass begins was cleared: its reduction is set aside until an
    optimizer steps the parameter. If the step uses what the last pass delivered, scaled or clipped, the earlier
    reductions were discarded. If it uses something else, that was computed from all of them (`DeliveredSigns`).

    Attributes:
        stepped: The parameters that optimizers have stepped since the last step ended.
    """

    def __init__(self, module: nn.Module, sync: GradientSync) -> None:
        self.stepped: set[str] = set()
        self._ddp_of: Callable[[], DistributedDataParallel | None] = lambda: None
        self._sync = sync
        self._name(dict(named_parameters(module)))
        # Optimizers in the order of their first steps, with the number of each one's last step.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._bound: Callable[[], Iterable[Optimizer]] = lambda: self._optimizers
        self._delivered = DeliveredSigns(sync)

    def bind(self, optimizers: Callable[[], Iterable[Optimizer]]) -> None:
        """Also know the learning rates of the optimizers that `optimizers` returns, and their order."""
        self._bound = optimizers

    def wrapped_by(self, model: DistributedDataParallel) -> None:
        """The model is now in this DDP wrapper."""
        self._ddp_of = weakref.ref(model)

    def follow(self, frozen: Frozen, *, is_served: bool) -> None:
        """Look up parameters again if the model's parameters have changed. Arguments and errors are those of
        `Frozen.follow`.
        """
        if self._sync.ranks.alone or (params := frozen.follow(is_served=is_served)) is None:
            return
        self._name(params)
        self._sync.transactions.follower.name_parameters()

    def _name(self, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        self._names = {id(param): name for name, param in params.items()}

    def owned_by(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        params = (param for group in optimizer.param_groups for param in group["params"])
        return {self._names[id(param)]: param for param in params if id(param) in self._names}

    def _rates(self) -> dict[str, Any]:
        """The learning rate of each parameter that an optimizer steps, in the order of the parameter groups: that of
        the optimizer that stepped it last, since it may replace others.
        """
        in_order = sorted(self._optimizers, key=self._optimizers.__getitem__)
        groups = [group for each in [*self._bound(), *in_order] for group in each.param_groups if "lr" in group]
        pairs = ((id(param), group["lr"]) for group in groups for param in group["params"])
        return {self._names[each]: rate for each, rate in pairs if each in self._names}

    def rates(self) -> dict[str, float]:
        return {name: float(rate) for name, rate in self._rates().items()}

    def first_rate(self) -> float | None:
        return next(map(float, self._rates().values()), None)

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` steps a parameter of this model."""
        return any(id(param) in self._names for group in optimizer.param_groups for param in group["params"])

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` has stepped before."""
        return optimizer in self._optimizers

    def any_owner(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer`, or one that has stepped before, steps a parameter of this model."""
        return bool(self._optimizers) or self.owns(optimizer)

    @property
    def param_ids(self) -> Set[int]:
        return self._names.keys()

    def serves(self, module: nn.Module) -> bool:
        shards = {at: record.sharded_param for at, record in shard_records(module).items()}
        return any(id(shards.get(id(param), param)) in self._names for param in module.parameters())

    def moves_nothing(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's step changes nothing, because the learning rate and all gradients are zero. torch
        takes such a step to create the state that it saves or loads into.
        """
        if has_rate(optimizer):
            return False
        given = [name for name, param in self.owned_by(optimizer).items() if param.grad is not None]
        return bool(given) and all(self._are_zero([given]))

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """Commit the parameters of this model that the optimizer has stepped. A step of an optimizer inside another one
        counts for both.

        Raises:
            RuntimeError: DDP was told not to synchronize the gradients.
        """
        owned = self.owned_by(optimizer)
        sync, transactions = self._sync, self._sync.transactions
        is_reduced = sync.rounds is None
        if is_reduced and not sync.ranks.alone and (model := self._ddp_of()) is not None:
            check_synchronizes(model)
        self._optimizers[optimizer] = next(self._numbers)
        stepped = [name for name, param in owned.items() if param.grad is not None and name not in self.stepped]
        self.stepped.update(stepped)
        if is_reduced:
            open_ones = transactions.open | set(transactions.undecided)
            transactions.roll_back([name for name in owned if name in open_ones and name not in self.stepped])
        if stepped and not (is_reduced and transactions.open.isdisjoint(stepped)):
            transactions.follower.stepped(optimizer)
        if stepped and is_reduced:
            self._settle({name: owned[name] for name in stepped})
            sync.commit(stepped)

    def _settle(self, stepped: Mapping[str, nn.Parameter]) -> None:
        """Decide what becomes of these parameters' reductions that were set aside."""
        transactions = self._sync.transactions
        if undecided := {name: param for name, param in stepped.items() if name in transactions.undecided}:
            transactions.settle(undecided, used=self._delivered.differ_from(undecided))

    def settle_all(self) -> None:
        """Settle all parameters, because an optimizer that does not derive from torch's has stepped."""
        self._settle({name: param for name, param in self._params.items() if param.grad is not None})

    def take_stepped(self) -> set[str]:
        """A step ends: return the parameters stepped in it."""
        stepped, self.stepped = self.stepped, set()
        return stepped

    def would_step(self, optimizer: Optimizer | None) -> set[str] | None:
        """The parameters that `optimizer` would have stepped if a loss scaler had not skipped it. None: all, by an
        optimizer that is not torch's.
        """
        return None if optimizer is None else set(self.owned_by(optimizer)) or None

    def roll_back_cleared(self) -> None:
        """A backward pass begins: set aside the reductions whose gradients are gone. If a loss scaler skips the step,
        none of them can be used: roll them back.
        """
        sync, reduced = self._sync, self._sync.transactions.open
        if not reduced or sync.rounds is not None:
            return
        cleared = [name for name in reduced if self._params[name].grad is None]
        cleared += self._zeroed([name for name in reduced if self._params[name].grad is not None])
        if cleared and sync.skips_overflow and sync.has_overflowed():
            sync.transactions.roll_back(cleared)
        elif cleared:
            sync.transactions.set_aside(cleared)

    def note_delivered(self) -> None:
        """A backward pass is about to reduce: note what it delivers if gradients have been cleared without a step."""
        if undecided := self._sync.transactions.undecided:
            self._delivered.note_after_backward({name: self._params[name] for name in undecided})

    def _zeroed(self, names: Iterable[str]) -> list[str]:
        """The parameters that ``zero_grad(set_to_none=False)`` has cleared: all gradients of an optimizer are zero on
        all ranks.

        Zeros in one parameter or on one rank prove nothing: no batch may have used its rows of an embedding.
        """
        left = set(names)
        groups: list[set[str]] = []
        for owned in [*(self.owned_by(optimizer).keys() for optimizer in self._optimizers), self._params.keys()]:
            groups += [left & owned] if left & owned else []
            left -= owned
        are_zero = self._are_zero(groups)
        return [name for members, is_zero in zip(groups, are_zero, strict=True) if is_zero for name in members]

    def _are_zero(self, groups: Sequence[Iterable[str]]) -> list[bool]:
        """Whether all gradients of each group are zero. In rounds each rank decides alone."""
        if not groups:
            return []
        counts = torch.zeros(len(groups), device=self._sync.device)
        for count, members in zip(counts, groups, strict=True):
            for name in members:
                if (grad := self._params[name].grad) is not None:
                    count += local_part(grad).any()
        summed = counts if self._sync.rounds is not None else self._sync.summed_in_parts(counts)
        are_zero: list[bool] = (summed == 0).tolist()
        return are_zero


def check_synchronizes(model: DistributedDataParallel) -> None:
    """Check, when an optimizer has stepped, that DDP synchronized the gradients of `model`.

    Raises:
        RuntimeError: DDP was told not to synchronize, or has not done so yet.
    """
    if in_backward():
        raise RuntimeError(
            "an optimizer has stepped inside the backward pass, before DistributedDataParallel has averaged the"
            " gradients: each rank would train on its own. Step after backward, or shard the model with fully_shard,"
            " where hooks of parameters are called with averaged gradients"
        )
    if not model.require_backward_grad_sync:
        raise RuntimeError(
            "an optimizer has stepped inside no_sync(): each rank has trained on its own gradients, and nothing was"
            " sent or compressed. Exit no_sync() before the last backward pass of a step. For ranks that train alone"
            " and synchronize only every few steps, as with Accelerate's LocalSGD, give the strategy or the plugin"
            " lowbit_strategy's outer=LocalSGD(every=8) instead"
        )
