"""What both Lightning strategies share: time, loss scale, checkpoints. Independent of the Lightning namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.stamp import Stamp
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.attach import CHECKPOINT_KEY, Attached, SyncOptions
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.quantization.loco import LoCo

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object


class LowBitMixin(_Base):
    """Put before a Lightning strategy in the bases of a class.

    `configure` is called from ``__init__``; the subclass attaches compression in its own set-up and calls `attached`.
    """

    compressor: Compressor
    options: SyncOptions
    attached: Attached | None

    def configure(self, compressor: Compressor | None, options: dict[str, Any]) -> None:
        """Raises:
        TypeError: `compressor` is not a configuration.
        ValueError: An option is unknown or out of range.
        """
        if compressor is not None and not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must be a configuration such as LoCo(bits=4), got {compressor!r}")
        self.compressor = compressor if compressor is not None else LoCo()
        self.options = SyncOptions(**options)
        self.attached = None
        self._attached_module: Any = None
        self.on_sync: list[Callable[[GradientSync], None]] = []  # callbacks that listen to the next fit's engine
        self._resume: tuple[Any, Stamp | None] | None = None

    @property
    def sync(self) -> GradientSync | None:
        """The engine, from set-up of a fit on: methods, state, accounting."""
        return self.attached.sync if self.attached is not None else None

    @property
    def loss_scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    def on_attached(self, attached: Attached) -> None:
        """Take over a new attachment: state of an earlier fit, or of a checkpoint that is waiting, goes in."""
        module = self.lightning_module
        while self.on_sync:  # first, so that their state is restored with the rest
            self.on_sync.pop(0)(attached.sync)
        if self.attached is not None:
            if self._attached_module is module:
                attached.adopt(self.attached)
            self.attached.close()
        self.attached, self._attached_module = attached, module
        if self._resume is not None:
            attached.load(*self._resume)
            self._resume = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.attached is not None and self.attached.newly_trainable():
            self.on_unfrozen()
        return super().training_step(*args, **kwargs)

    def on_unfrozen(self) -> None:
        """Parameters have been unfrozen since set-up, on all ranks: synchronise them from now on."""
        assert self.attached is not None
        self.attached.cover()

    def pre_backward(self, closure_loss: Any) -> None:
        super().pre_backward(closure_loss)
        if self.attached is not None:
            self.attached.set_loss_scale(self.loss_scaler)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.attached is not None:
            self.attached.end_step()
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.attached is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        filepath = self.broadcast(filepath)
        written = self.attached.save(filepath)  # on all ranks: no checkpoint without all of its residual files
        checkpoint[CHECKPOINT_KEY] = written.stamp
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()
        written.remove_replaced()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == "fit":
            self._resume = (checkpoint_path, checkpoint.get(CHECKPOINT_KEY))
            if self.attached is not None and self.restore_checkpoint_after_setup:
                self.attached.load(*self._resume)
                self._resume = None
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        residual_files.remove(filepath, self.global_rank, self.world_size)

    def teardown(self) -> None:
        if self.attached is not None:
            self.attached.close()
        super().teardown()
