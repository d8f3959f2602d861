"""FSDP2 under Lightning for any LightningModule, gradients compressed; independent of the Lightning namespace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from lowbit_strategy.attach.attach import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.strategy_options import FSDPConstructor
from lowbit_strategy.checkpoint.explain_mismatch import explain_mismatch
from lowbit_strategy.checkpoint.stateless_optimizers import optimizers_without_state
from lowbit_strategy.hooks.fsdp import cost_of_accumulation
from lowbit_strategy.inform import inform
from lowbit_strategy.lightning.base_strategy import LowBitMixin
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, end_iteration, shard_any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _Base
else:
    _Base = object

_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")  # Lightning's callbacks that copy the module


class LowBitFSDPMixin(LowBitMixin, FSDPConstructor, _Base):
    """See `lowbit_strategy.lightning.LowBitFSDPStrategy`."""

    def setup(self, trainer: Any) -> None:
        """As the stock strategy's, but sharding is done here instead of in ``configure_model``."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        fitting = trainer.state.fn == "fit"
        if fitting:
            _refuse_averaging(trainer.callbacks)
            if self._layer_sync is not None:  # sync_batchnorm=True
                self.model = self._layer_sync.apply(self.model)
            prepared = prepare(self.model, self.compressor, self.options, scatter=True)
        policy = ShardPolicy(
            min_numel=self.min_shard_numel,
            forward_methods=_FORWARD_METHODS,
            by_child=not self.lightning_module.automatic_optimization,  # backward runs inside of training_step
            mp_policy=self.policy_of(self.precision_plugin),
        )
        shard_any(self.model, self.device_mesh["data_parallel"], self.root_device, policy)
        self.barrier()
        if fitting:
            session = attach_fsdp(
                self.model,
                prepared,
                device=self.root_device,
                group=self.all_ranks,
                has_scaler=self.loss_scaler is not None,
            )
            self.on_attached(session)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._move_optimizers()

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if self.model is None or trainer is None or self.global_rank > 0:
            return
        if sentence := cost_of_accumulation(self.model, trainer.accumulate_grad_batches, self.accumulate):
            inform("%s", sentence)

    def _move_optimizers(self) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if hasattr(value, "to"):
                        state[key] = value.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Gradient accumulation. Stock Lightning knows DDP only, and lets FSDP2 reduce every micro-batch.

        ``local``: FSDP2 keeps unsharded gradients, nothing is sent before the last micro-batch. ``reduce``: gradients
        are reduced each time, weights still travel once per step.
        """
        assert self.model is not None
        modules = self.model.modules() if self.accumulate == "local" else ()
        sharded = [child for child in modules if isinstance(child, FSDPModule)]
        for child in sharded:
            child.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for child in sharded:
                child.set_requires_gradient_sync(True, recurse=False)
        if self.session is not None:
            self.session.weights_unchanged()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        with explain_mismatch(checkpoint_path, {"state_dict": self.model}), optimizers_without_state(self):
            return super().load_checkpoint(checkpoint_path, weights_only)

    def teardown(self) -> None:
        if self.model is not None:
            end_iteration(self.model)
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: `lowbit_strategy.register` does it, for both kinds."""


def _refuse_averaging(callbacks: list[Any]) -> None:
    """Raises:
    ValueError: A callback averages weights in a copy of the module.
    """
    for callback in callbacks:
        if any(base.__name__ in _AVERAGING for base in type(callback).__mro__):
            raise ValueError(
                f"{type(callback).__name__} averages weights in a copy of the whole module, and FSDP2 keeps a shard of"
                " them on each rank: use a DDP strategy such as loco_ddp with it, or average the checkpoints afterwards"
            )
