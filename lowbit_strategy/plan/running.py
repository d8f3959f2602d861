"""Reads from an engine what a step sends and keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.param_groups import Layout, ParamGroup
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.ranks.ranks import Ranks


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
    """The plan of a step for the parameters that `ranks` reduce (None: the engine's `ranks`), as it is, or with other
    methods and another coding of weights.
    """
    weights, ranks, ranks_of = sync.weights, ranks or sync.ranks, sync.state.ranks_of
    rounds: Any = sync.rounds
    assignments = sync.state.assignments if assignments is None else assignments
    own = [name for name in sync.specs if ranks_of(name) is ranks]
    expected = [each for each in sync.expected_groups if ranks_of(each.names[0]) is ranks]
    known = {name for each in expected for name in each.names}
    later = tuple(name for name in reversed(own) if name not in known)
    layout: Layout = "fsdp" if sync.scatter else "ddp" if weights is None else "hsdp"
    modules = {} if weights is None else weights.layouts
    return make_plan(
        [sync.specs[name] for name in own],
        {name: assignments[name] for name in own},
        ranks.topology,
        layout,
        reduced=[*expected, *([ParamGroup(later)] if later else ())],
        coding=None if weights is None else coding or weights.coding,
        modules={name: each for name, each in modules.items() if ranks_of(each.specs[0].name) is ranks},
        round_plan=None if rounds is None else rounds.planned(ranks),
        device_type=sync.device.type,
        extra=getattr(sync.follower, "extra", Extra()),
        copies=sync.transactions.keeps_copies,
    )
