"""Which parameters are frozen, and which have been frozen, unfrozen or replaced since the model was set up."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.held_parameters import HeldParameters
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, trainable_parameters


class Frozen:
    """Compares a model's parameters with what they were when it was set up.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = HeldParameters(module)
        self._frozen = {canonical_name(n): param for n, param in module.named_parameters() if not param.requires_grad}
        self._expected = trainable_parameters(module)  # whose gradients DDP waits for

    def follow(self, *, is_served: bool) -> dict[str, nn.Parameter] | None:
        """All parameters by name, if they are others than before; None: they are the same.

        Args:
            is_served: As for `HeldParameters.follow`, which raises what this does.
        """
        if not self._held.follow(is_served=is_served):
            return None
        params = self._held.by_name
        new = params.keys() - self._frozen.keys() - self._expected.keys()
        self._frozen = {name: param for name, param in params.items() if name in self._frozen or name in new}
        self._expected = {name: param for name, param in params.items() if name in self._expected}
        return params

    def describe(self, names: Iterable[str]) -> list[TensorSpec]:
        """Those of `names` that are frozen: their residuals are kept until they are trained again."""
        also = {name for name in names if name in self._frozen}
        return [spec for spec in describe_parameters(self._module, also) if spec.name in also]

    def newly_trainable(self) -> list[str]:
        """Parameters that were frozen at set-up and are not any more."""
        return [name for name, param in self._frozen.items() if param.requires_grad]

    def newly_frozen(self) -> list[str]:
        """Parameters that DDP waits for and that are frozen now."""
        return [name for name, param in self._expected.items() if not param.requires_grad]

    def take_newly_trainable(self) -> tuple[list[TensorSpec], dict[str, nn.Parameter]]:
        """Those parameters, which count as trained from now on."""
        names = set(self.newly_trainable())
        self._frozen = {name: param for name, param in self._frozen.items() if name not in names}
        specs = [spec for spec in describe_parameters(self._module) if spec.name in names]
        return specs, {n: p for n, p in trainable_parameters(self._module).items() if n in names}

    def wrapped_anew(self) -> None:
        """DDP waits for what is trainable now."""
        self._frozen |= {name: self._expected[name] for name in self.newly_frozen()}
        self._expected = trainable_parameters(self._module)
