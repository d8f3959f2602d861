"""The parameters that a model had when it was set up: others in their place must not train unsynchronised."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit_strategy.model.fsdp_sharding import check_held, sharded_groups, sharded_parameters


class HeldParameters:
    """A model's parameters, compared by identity before each step: a fraction of a millisecond, nothing is read.

    Args:
        module: As it was set up.

    Attributes:
        by_name: All of them; of those that FSDP2 shards, the shards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look_up()

    def _look_up(self) -> None:
        self.by_name = sharded_parameters(self._module)
        self._places = self._identities()

    def _identities(self) -> list[tuple[int, ...]]:
        """Of what modules hold. FSDP2 takes its parameters out of the modules in every step."""
        modules = list(self._module.modules())
        shards = [param for each in sharded_groups(self._module) for param in each.param_group.fsdp_params]
        found = [tuple(map(id, child._modules.values())) for child in modules]
        if not shards:
            return found + [tuple(map(id, child._parameters.values())) for child in modules]
        return [*found, tuple(id(param.sharded_param) for param in shards)]

    def follow(self, *, is_served: bool) -> bool:
        """Whether the model has other parameters than when this was last called; they are `by_name` from now on.

        Args:
            is_served: What FSDP2 shards is synchronised, whatever it is.

        Raises:
            RuntimeError: One is trained and nothing synchronises it.
            ValueError: FSDP2 shards one that the model does not have any more.
        """
        if self._identities() == self._places:
            return False
        check_held(self._module)
        before = {id(param) for param in self.by_name.values()}
        self._look_up()
        sharded: set[Any] = set()
        if is_served:
            sharded = {id(p.sharded_param) for g in sharded_groups(self._module) for p in g.param_group.fsdp_params}
        for name, param in self.by_name.items():
            if param.requires_grad and id(param) not in before | sharded:
                raise RuntimeError(
                    f"{name} is another parameter than when the model was set up, and nothing synchronises its"
                    " gradients: it was loaded with assign=True, or its layer was replaced or added. Load without"
                    " assign=True, and change the model before it is set up, or set it up anew"
                )
        return True
