"""What both Fabric strategies share: steps, loss scale, checkpoints. Independent of the Fabric namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowbit_strategy.checkpoint.stamp import Stamp
from lowbit_strategy.hooks.attach import CHECKPOINT_KEY, Attached, SyncOptions
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.quantization.loco import LoCo

if TYPE_CHECKING:
    from lightning.fabric.strategies import ParallelStrategy as _Base
else:
    _Base = object


class LowBitFabricMixin(_Base):
    """Put before a Fabric strategy in the bases of a class. One attachment a model that is set up."""

    compressor: Compressor
    options: SyncOptions
    attachments: list[Attached]

    def configure(self, compressor: Compressor | None, options: dict[str, Any]) -> None:
        """Raises:
        TypeError: `compressor` is not a configuration.
        ValueError: An option is unknown or out of range.
        """
        if compressor is not None and not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must be a configuration such as LoCo(bits=4), got {compressor!r}")
        self.compressor = compressor if compressor is not None else LoCo()
        self.options = SyncOptions(**options)
        self.attachments = []

    @property
    def loss_scaler(self) -> Any:
        return getattr(self.precision, "scaler", None)

    def attach(self, attached: Attached) -> None:
        """Take over a new attachment, in the place of an earlier one of the same module if there is one."""
        for index, earlier in enumerate(self.attachments):
            if earlier.shares_parameters(attached):
                attached.adopt(earlier)
                earlier.close()
                self.attachments[index] = attached
                return
        self.attachments.append(attached)

    def on_unfrozen(self, attached: Attached) -> None:
        """Parameters have been unfrozen since set-up, on all ranks: synchronise them from now on."""
        attached.cover()

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        for attached in self.attachments:
            attached.set_loss_scale(self.loss_scaler)
            if attached.newly_trainable():
                self.on_unfrozen(attached)
        super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for attached in self.attachments:
            if attached.owns(optimizer):
                attached.end_step()
        return output

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        path = self.broadcast(path)
        attachments = self._attachments_of(state)
        written = [attached.save(self._sidecar_path(path, i)) for i, attached in enumerate(attachments)]
        stamps = [each.stamp for each in written]
        super().save_checkpoint(path, {**state, CHECKPOINT_KEY: stamps}, *args, **kwargs)
        self.barrier()
        for each in written:
            each.remove_replaced()

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, (nn.Module, torch.optim.Optimizer)):
            return remainder  # the weights alone
        stamps: list[Stamp] | None = remainder.pop(CHECKPOINT_KEY, None)
        for i, attached in enumerate(self._attachments_of(state or {})):
            stamp = stamps[i] if stamps is not None and i < len(stamps) else None
            attached.load(self._sidecar_path(path, i), stamp)
        return remainder

    def _attachments_of(self, state: dict[str, Any]) -> list[Attached]:
        """Of the models in `state`; all of them if it has none (state dicts instead of modules)."""
        if not (modules := [value for value in state.values() if isinstance(value, nn.Module)]):
            return self.attachments
        return [each for each in self.attachments if any(each.serves(module) for module in modules)]

    @staticmethod
    def _sidecar_path(path: Any, index: int) -> str:
        """The first model's files lie at the checkpoint's own name, a second one's (a GAN's critic) beside them."""
        return str(path) if index == 0 else f"{path}.{index}"
