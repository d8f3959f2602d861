"""Reads an engine's messages and memory in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.ddp import hooked
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.parameters import named_parameters
from lowbit_strategy.model.sharded import reduce_dtype, sharded_groups
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup, ddp_buckets
from lowbit_strategy.ranks.ranks import Ranks

_expected: WeakKeyDictionary[GradientSync, Sequence[ParamGroup]] = WeakKeyDictionary()


def expect(sync: GradientSync, module: nn.Module) -> None:
    """Note the parameters that hooks will reduce together, in the order of backward, if nothing changes. Call it once
    the hooks of `module` have been made.
    """
    params = [(name, param) for name, param in named_parameters(module) if name in sync.specs]
    if sync.weights is not None:
        _expected[sync] = _of_sharded(module, {id(param): name for name, param in params})
        return
    sizes = [(name, param.numel(), param.element_size()) for name, param in params]
    caps = [hook.cap_nbytes for hook in hooked.values() if hook.sync is sync]  # none if gradients stay on their rank
    _expected[sync] = [bucket for cap in caps for bucket in ddp_buckets(sizes, cap)]


def _of_sharded(module: nn.Module, names: Mapping[int, str]) -> list[ParamGroup]:
    """The parameters that each of FSDP2's modules reduces, the last module first."""
    found = []
    for each in reversed(sharded_groups(module)):
        if own := [names[id(shard)] for shard in each.shards if id(shard) in names and shard.requires_grad]:
            found.append(ParamGroup(tuple(own), reduce_dtype(each.param_group).itemsize, own[0].rpartition(".")[0]))
    return found


def plans_of(sync: GradientSync) -> list[StepPlan]:
    """The plans of a step, one for each set of ranks that reduces parameters."""
    return [plan_of(sync, ranks=ranks) for ranks in sync.all_ranks]


def plan_of(
    sync: GradientSync,
    assignments: Mapping[str, Assignment] | None = None,
    coding: WeightCoding | None = None,
    *,
    ranks: Ranks | None = None,
) -> StepPlan:
    """The plan of a step for the parameters that `ranks` reduce (None: the engine's `ranks`), optionally with other
    methods and a different coding of weights.
    """
    weights, ranks, ranks_of = sync.weights, ranks or sync.ranks, sync.state.ranks_of
    rounds: Any = sync.rounds
    assignments = sync.state.assignments if assignments is None else assignments
    own = [name for name in sync.specs if ranks_of(name) is ranks]
    expected = [each for each in _expected.get(sync, ()) if ranks_of(each.names[0]) is ranks]
    known = {name for each in expected for name in each.names}
    later = tuple(name for name in reversed(own) if name not in known)
    wrapper: Wrapper = "fsdp" if sync.sharded else "ddp" if weights is None else "hsdp"
    modules = {} if weights is None else weights.layouts
    return make_plan(
        [sync.specs[name] for name in own],
        {name: assignments[name] for name in own},
        ranks.topology,
        wrapper,
        reduced=[*expected, *([ParamGroup(later)] if later else ())],
        coding=None if weights is None else coding or weights.coding,
        modules={name: each for name, each in modules.items() if ranks_of(each.specs[0].name) is ranks},
        round_plan=None if rounds is None else rounds.planned(ranks),
        device_type=sync.device.type,
        extra=getattr(sync.transactions.follower, "extra", Extra()),
        copies=sync.transactions.keeps_copies,
    )
