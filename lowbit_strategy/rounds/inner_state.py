"""The inner optimizers' state, averaged over the ranks every few rounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.outer.rule import ALL_STATE, AverageState, StateCode
from lowbit_strategy.plan.rounds import buckets_of

# Never negative. Sent as their roots, whose range is half as wide.
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})

# Numerator, and the square of the denominator; Adamax divides by the last one itself.
_RATIOS = (("exp_avg", "exp_avg_sq"), ("exp_avg", "max_exp_avg_sq"), ("grad_avg", "square_avg"), ("exp_avg", "exp_inf"))

# By parameter name: the options of its group, overridden by the optimizer's state of it.
States = Mapping[str, Mapping[str, Any]]


class InnerState:
    """Averages the inner optimizers' state of each parameter, when its fragment synchronizes.

    For each key that is due in this round:

    1. the number of ranks that have it for each parameter: one float each, summed over ranks
    2. the mean over those ranks goes through an exchange of its own, blockwise codes without a residual; squares are
       sent as their roots
    3. it replaces each rank's own. A mean of squares is at least the square of the own root over the number of ranks,
       regardless of rounding: what an optimizer divides by never vanishes
    4. second moments are raised where first moments have become too large for them (`bound_`)

    It has no state to save.

    Args:
        sync: Of the weights; its communicator is used, and its account of bytes.
        every: Rounds between two averages by key.
        states: Gives this rank's optimizer state, in live tensors, and the options of each parameter's group.
    """

    def __init__(self, sync: GradientSync, every: AverageState, states: Callable[[], States]) -> None:
        self._sync = sync
        self._every = dict(ALL_STATE if every is True else every or ())
        self._states = states
        specs = [
            replace(spec, name=_joined(key, name)) for key in sorted(self._every) for name, spec in sync.specs.items()
        ]
        self._ranks = replace(sync.ranks, intra_node=None)  # specs are of parts already
        self._exchange = GradientSync(StateCode(), specs, self._ranks, sync.device, scatter=False, seed=sync.seed)

    def average(self, names: Iterable[str], round_index: int, *, last: bool = False) -> None:
        """On all ranks.

        Args:
            names: The fragment's parameters.
            round_index: Rounds completed, with this one.
            last: All keys are due.
        """
        pairs = [
            (key, name)
            for name in names
            for key in sorted(self._every)
            if last or round_index % self._every[key] == 0
            if self._sync.specs[name].numel
        ]
        before = self._sync.ranks.peers.sent_nbytes
        if pairs and self._sync.ranks.peers.world_size > 1:
            self._average(pairs)
            states = self._states()
            for name in dict.fromkeys(name for _, name in pairs):
                bound_(states.get(name, {}))
        self._sync.byte_check.add_untracked(self._sync.ranks.peers.sent_nbytes - before)

    def _average(self, pairs: Sequence[tuple[str, str]]) -> None:
        own = self._own(pairs)
        counts = torch.tensor([float(tensor is not None) for tensor in own], device=self._sync.device)
        self._sync.ranks.peers.all_reduce(counts).wait()
        kept = [
            _Kept(key, self._sync.specs[name], tensor, int(count))
            for (key, name), tensor, count in zip(pairs, own, counts.tolist(), strict=True)
            if count
        ]
        if not kept:
            return
        self._exchange.begin_step()
        left = iter(kept)
        for specs in buckets_of([each.spec for each in kept]):
            self._reduce(list(itertools.islice(left, len(specs))))
        self._exchange.end_step()

    @torch.no_grad()
    def _reduce(self, part: Sequence[_Kept]) -> None:
        entries, at = [], 0
        for each in part:
            entries.append((_joined(each.key, each.spec.name), at))
            at += each.spec.numel
        x_N = torch.cat([each.sent(self._sync.device) for each in part])
        wait_for_all(self._exchange.reduce(BucketLayout(tuple(entries), last=True), x_N, x_N))
        for each, mean_N in zip(part, x_N.split([each.spec.numel for each in part]), strict=True):
            each.take_(mean_N * (self._sync.ranks.peers.world_size / each.num_ranks))

    def _own(self, pairs: Sequence[tuple[str, str]]) -> list[Tensor | None]:
        """This rank's state; None where it has none, or it is not finite."""
        states, specs = self._states(), self._sync.specs
        found = [states.get(name, {}).get(key) for key, name in pairs]
        fitting = [
            each if isinstance(each, Tensor) and each.numel() == specs[name].numel else None
            for each, (_, name) in zip(found, pairs, strict=True)
        ]
        finite = [each.isfinite().all() for each in fitting if each is not None]
        usable = iter(torch.stack(finite).tolist() if finite else ())
        return [each if each is not None and next(usable) else None for each in fitting]


class _Kept(NamedTuple):
    """One key of one parameter that some ranks have.

    Args:
        key: The optimizer's.
        spec: The parameter.
        tensor: This rank's own, live; None if it has none.
        num_ranks: Ranks that have it.
    """

    key: str
    spec: TensorSpec
    tensor: Tensor | None
    num_ranks: int

    def sent(self, device: torch.device) -> Tensor:
        """float32 ``[numel]``."""
        if self.tensor is None:
            return torch.zeros(self.spec.numel, device=device)
        values = self.tensor.detach().float().reshape(-1)
        return values.sqrt() if self.key in _SQUARES else values

    def take_(self, mean_N: Tensor) -> None:
        """Replace the own by the mean."""
        if self.tensor is None:
            return
        mean = mean_N.view(self.tensor.shape)
        if self.key in _SQUARES:
            mean = torch.maximum(mean, self.tensor.float().sqrt() / self.num_ranks).square()
        self.tensor.copy_(mean)


@torch.no_grad()
def bound_(state: Mapping[str, Any]) -> None:
    """Limit an Adam-like optimizer's step to about its learning rate, after its moments were averaged.

    It steps by ``m / (1 - beta1**t)`` over the root of ``v / (1 - beta2**t)``: weighted means of the gradients of `t`
    steps and of their squares. The square of a mean is at most the mean of the squares, if both have one history. But
    an element that was idle on this rank gets the others' ``m``, while its own ``v`` may stay or be rounded to 0:

    1. ``v = max(v, (1 - beta2**t) * (m / (1 - beta1**t))**2)``
    2. the same for other optimizers' pairs; without bias correction both factors are 1

    Args:
        state: The optimizer's state of one parameter, with ``betas`` and ``step`` if it has them; changed in place.
    """
    beta1, beta2 = state.get("betas", (0.0, 0.0)) if "step" in state else (0.0, 0.0)
    step = torch.as_tensor(state.get("step", 1)).clamp(min=1)
    for first, second in _RATIOS:
        if not isinstance(state.get(first), Tensor) or not isinstance(state.get(second), Tensor):
            continue
        mean = state[first].float() / (1 - beta1**step)
        low = mean.square() * (1 - beta2**step) if second in _SQUARES else mean.abs()
        state[second].copy_(torch.maximum(state[second].float(), low))


def _joined(key: str, name: str) -> str:
    return f"{name}[{key}]"
