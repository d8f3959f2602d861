"""FSDP2 under Lightning for any LightningModule, gradients compressed; independent of the Lightning namespace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from lowbit_strategy.attach.attach import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.strategy_options import FSDPConstructor
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.checkpoint.loading import explain_mismatch, optimizers_without_state
from lowbit_strategy.hooks.fsdp import cost_of_accumulation
from lowbit_strategy.inform import inform
from lowbit_strategy.lightning.base_strategy import LowBitMixin
from lowbit_strategy.lightning.bases import ModelParallelStrategy
from lowbit_strategy.lightning.local_callbacks import averages_weights
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, end_iteration, shard_any
from lowbit_strategy.options.documentation import documented_options

_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


@documented_options(SyncOptions)
class LowBitFSDPMixin(LowBitMixin, FSDPConstructor, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, for any LightningModule: no ``configure_model`` needed.

    Entries of module lists and sequences with at least ``min_shard_numel`` parameters are sharded one by one, the rest
    as one module. A module that shards itself in ``configure_model`` is taken as it is. With one rank nothing is
    compressed. ``sync_batchnorm=True`` works; callbacks that average weights in a copy of the module are refused.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        mp_policy: FSDP2's types. None: as the trainer's ``precision`` says. With ``bf16-mixed`` weights are gathered,
            and computed with, in bfloat16, float inputs of modules are cast to it, and gradients are reduced in
            float32; batch norms keep the parameters' type.
        accumulate: With ``accumulate_grad_batches``. ``local``: unsharded gradients are kept on every rank until the
            last micro-batch, and compressed once per step; ``reduce``: every micro-batch is reduced, as the stock
            strategy does, which keeps none and sends as many times the bytes.
        save_distributed_checkpoint: True: a folder of shards; False: one full file, which ``load_from_checkpoint``
            reads.
        process_group_backend, timeout: As for ``ModelParallelStrategy``.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """

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
        trainer = self.fitted_trainer
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


def _refuse_averaging(callbacks: list[Any]) -> None:
    """Raises:
    ValueError: A callback averages weights in a copy of the module.
    """
    for callback in callbacks:
        if averages_weights(callback):
            raise ValueError(
                f"{type(callback).__name__} averages weights in a copy of the whole module, and FSDP2 keeps a shard of"
                " them on each rank: use a DDP strategy such as loco_ddp with it, or average the checkpoints afterwards"
            )
