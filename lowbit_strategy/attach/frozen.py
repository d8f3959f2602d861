"""Tracks which parameters are trained, and whether they are still the ones known at set-up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.model.parameters import (
    describe_parameters,
    keep_names,
    named_parameters,
    sharded_parameters,
    trainable_parameters,
)
from lowbit_strategy.model.sharded import check_held, sharded_groups


class Frozen:
    """Compares a model's parameters with those at set-up, so that no replacement trains unsynchronized."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        keep_names(module)
        self._frozen = {name: param for name, param in named_parameters(module) if not param.requires_grad}
        self._expected = trainable_parameters(module)  # DDP waits for their gradients
        self._look_up()

    def _look_up(self) -> None:
        self._by_name = sharded_parameters(self._module)
        self._ids = self._identities()

    def _identities(self) -> list[tuple[int, ...]]:
        """Identities of modules and parameters; finding them takes a fraction of a millisecond."""
        modules = list(self._module.modules())
        shards = [shard for each in sharded_groups(self._module) for shard in each.shards]
        found = [tuple(map(id, child._modules.values())) for child in modules]
        if not shards:
            return found + [tuple(map(id, child._parameters.values())) for child in modules]
        return [*found, tuple(map(id, shards))]

    def follow(self, *, is_served: bool) -> dict[str, nn.Parameter] | None:
        """Return all parameters (or their shards) by name if they have changed, otherwise None.

        Args:
            is_served: Whether the parameters that FSDP2 shards are synchronized.

        Raises:
            RuntimeError: A trained parameter is not synchronized.
            ValueError: FSDP2 shards a parameter that the model no longer has.
        """
        if self._identities() == self._ids:
            return None
        check_held(self._module, sharded_groups(self._module))
        known = {id(param) for param in self._by_name.values()}
        self._look_up()
        params = self._by_name
        if is_served:
            known |= {id(shard) for each in sharded_groups(self._module) for shard in each.shards}
        for name, param in params.items():
            if param.requires_grad and id(param) not in known:
                raise RuntimeError(
                    f"{name} is not the parameter that the model had when it was set up, and nothing synchronizes its"
                    " gradients: it was loaded with assign=True, or its layer was replaced or added. Load without"
                    " assign=True, and change the model before it is set up, or set it up again"
                )
        new = params.keys() - self._frozen.keys() - self._expected.keys()
        self._frozen = {name: param for name, param in params.items() if name in self._frozen or name in new}
        self._expected = {name: param for name, param in params.items() if name in self._expected}
        return params

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Describe the frozen parameters among `names`; their residuals are kept until they are trained again."""
        also = {name for name in names if name in self._frozen}
        return [spec for spec in describe_parameters(self._module, also) if spec.name in also]

    def newly_trainable(self) -> list[str]:
        """Parameters that were frozen at set-up and are now trainable."""
        return [name for name, param in self._frozen.items() if param.requires_grad]

    def newly_frozen(self) -> list[str]:
        """Parameters that DDP waits for although they are frozen now."""
        return [name for name, param in self._expected.items() if not param.requires_grad]

    def take_newly_trainable(self) -> tuple[list[TensorSpec], dict[str, nn.Parameter]]:
        """Return the newly trainable parameters, which count as trained from now on."""
        names = set(self.newly_trainable())
        self._frozen = {name: param for name, param in self._frozen.items() if name not in names}
        specs = [spec for spec in describe_parameters(self._module) if spec.name in names]
        return specs, {n: p for n, p in trainable_parameters(self._module).items() if n in names}

    def rewrapped(self) -> None:
        """Note that the model was wrapped in DDP again, which waits for the parameters that are trainable now."""
        self._frozen |= {name: self._expected[name] for name in self.newly_frozen()}
        self._expected = trainable_parameters(self._module)
