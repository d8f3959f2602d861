"""The rounds of a rule for replicas that join and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lowbit_strategy.attach.prepare import PreparedModel, settings_of
from lowbit_strategy.attach.rounds import EveryStep, RoundRule
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.elastic.membership import Membership
from lowbit_strategy.elastic.options import Elastic
from lowbit_strategy.elastic.outer import ElasticOuterSync
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import fingerprint, named_parameters, to_plain
from lowbit_strategy.plan.rounds import RoundPlan
from lowbit_strategy.ranks.groups import new_group
from lowbit_strategy.ranks.ranks import Ranks

_NO_TIMEOUT = timedelta(days=30)


class ElasticRounds(RoundRule):
    """Args:
    elastic: Who meets.
    rule: When, and how.
    """

    comes_and_goes: ClassVar[bool] = True

    def __init__(self, elastic: Elastic, rule: OuterRule) -> None:
        self._elastic, self._rule = elastic, rule

    @property
    def begins_in_steps(self) -> bool:
        return self._rule.begins_in_steps

    def compressor(self) -> Compressor:
        return self._rule.compressor()

    def planned(self, every: int | None = None) -> RoundPlan:
        return self._rule.planned(every)

    def check_options(self, options: Any) -> None:
        rule = self._rule
        if rule.travels_a_turn:
            raise ValueError(
                f"elastic does not go with {rule.name}, an outer rule whose exchanges last a round: members are known"
                " for one exchange alone. Take DiLoCo or LocalSGD"
            )
        for field in ("delay", "synchronous"):
            if getattr(rule, field):
                raise ValueError(
                    f"elastic does not go with {field} of an outer rule: members change at the beginning of an"
                    " exchange, and are known for that one alone. Leave it out"
                )
        rule.check_options(options)

    def check_layout(self, options: Any, *, scatter: bool) -> None:
        self._rule.check_layout(options, scatter=scatter)

    def check_model(self, compressor: Compressor, specs: Sequence[TensorSpec]) -> None:
        self._rule.check_model(compressor, specs)

    def check_meshes(self, prepared: PreparedModel, meshes: Sequence[Ranks]) -> None:
        raise ValueError(
            "elastic= serves models whose parameters are all on one mesh, and this one has some, such as experts, on"
            " another: leave it out"
        )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        self._rule.check_optimizer(optimizer)

    def registered(
        self, prepared: PreparedModel, module: nn.Module, group: dist.ProcessGroup | None
    ) -> Callable[..., EveryStep]:
        """This replica becomes known to the others, which it meets in `Session.resume`; call on all of its ranks.

        Raises:
            ValueError: There are several ranks, and the model is not sharded over them.
            ConnectionError: Nobody answers at the lighthouse's address.
        """
        if (num_ranks := dist.get_world_size(group)) > 1 and not prepared.scatter:
            raise ValueError(
                f"elastic serves replicas of one process each under DDP, and this one has {num_ranks}: start each with"
                ' devices=1, num_nodes=1, or let its ranks share one model with LowBitFSDPStrategy(shard_size="node")'
            )
        shard_size = prepared.topology.node_size
        if prepared.scatter and shard_size != num_ranks:
            raise ValueError(
                f"elastic serves nodes that share one model, and this one has {num_ranks} ranks with"
                f' shard_size={shard_size}: give shard_size="node", and start each node as its own run'
            )
        inside = None
        if num_ranks > 1:  # on the CPU: while the first rank waits for other replicas, the others wait for it
            members = dist.get_process_group_ranks(group)
            inside = GroupComm(new_group(members, group, "replica", timeout=_NO_TIMEOUT, backend="gloo"))
        membership = Membership(self._elastic, self._facts(prepared, module), inside)
        return partial(self._rule.meet, make_outer=partial(ElasticOuterSync, membership=membership))

    def _facts(self, prepared: PreparedModel, module: nn.Module) -> dict[str, Any]:
        """What is the same on all replicas."""
        settings = settings_of(prepared.options) | {"shard_size": prepared.topology.node_size}
        same = fingerprint(prepared.compressor, module, scatter=prepared.scatter, settings=settings)
        same |= to_plain("outer", self._rule)
        for own in ("elastic", "memory"):
            same.pop(own, None)
        frozen = ((name, param) for name, param in named_parameters(module) if not param.requires_grad)
        return same | {"frozen parameters": [(name, tuple(param.shape)) for name, param in frozen]}

    def adapter(self, framework: str) -> Any:
        return import_module(f"lowbit_strategy.elastic.{framework}")
