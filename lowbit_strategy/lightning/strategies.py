"""DDP and FSDP2 with compressed gradients."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.constructors import DDPConstructor, FSDPConstructor
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import PreparedModel, prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.inform import inform
from lowbit_strategy.model.sharded import cost_of_accumulation, end_iteration, reshard

from .base_strategy import SessionStrategy
from .stock import DDPStrategy, ModelParallelStrategy

_UNUSED = "Expected to have finished reduction in the prior iteration"  # from PyTorch's message


class LowBitDDPStrategy(SessionStrategy, DDPConstructor, DDPStrategy):
    """DDP with compressed gradient synchronization.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        kwargs: Fields of `SyncOptions`, and arguments of ``DDPStrategy`` except its hooks. In a notebook,
            ``start_method="fork"`` (the name ``loco_ddp_notebook``) trains with several processes. With ``"fork"`` and
            ``"spawn"``, save with ``ModelCheckpoint``: when ``fit`` returns, the processes have ended and their
            residuals are gone.

    With one rank nothing is compressed.

    Raises:
        TypeError: An option is unknown.
        ValueError: An option is out of range, or a communication hook is given.
    """

    _prepared: PreparedModel

    def configure_ddp(self) -> None:
        assert self.lightning_module is not None
        self._prepared = prepare(self.lightning_module, self.compressor, self.options, scatter=False)
        self.choose_buckets(self.root_device)
        super().configure_ddp()

    def _register_ddp_hooks(self) -> None:
        """Do nothing: stock Lightning would register hooks here, but only on CUDA, and ours work on CPU too."""
        assert isinstance(self.model, DistributedDataParallel)
        self.take_over(self._attached(attach_ddp, self.model, self._prepared))

    def serve_unfrozen(self, session: Session) -> None:
        """Wrap the module again, because DDP synchronizes only what was trainable when it wrapped the module; with
        stock DDP ranks would drift apart silently. DDP would also wait for parameters that have been frozen since, and
        stop.
        """
        if session.is_in_rounds:  # DDP synchronizes nothing
            super().serve_unfrozen(session)
            return
        waits = not getattr(self.model, "find_unused_parameters", True)
        if not session.frozen.newly_trainable() and not (waits and session.frozen.newly_frozen()):
            return
        assert self.lightning_module is not None
        assert isinstance(self.model, DistributedDataParallel)
        self.model._remove_autograd_hooks()
        wrapped = self._setup_model(self.lightning_module)
        session.extend(wrapped)  # before the old wrapper is deleted together with its process group
        self.model = wrapped

    def on_exception(self, exception: BaseException) -> None:
        """Replace Lightning's advice for unused parameters, which names a strategy without compression."""
        if not any(_UNUSED in str(argument) for argument in exception.args):
            super().on_exception(exception)
            return
        advice = (
            "The model has parameters that the loss of training_step does not depend on, and DDP waits for their"
            ' gradients. If that is intended, use Trainer(strategy="loco_ddp_find_unused_parameters_true") (or the same'
            f" name of another compressor), or {type(self).__name__}(..., find_unused_parameters=True)."
        )
        exception.args = ("\n".join([advice, *map(str, exception.args)]),)


class LowBitFSDPStrategy(SessionStrategy, FSDPConstructor, ModelParallelStrategy):
    """FSDP2 with a compressed gradient reduce-scatter, for any LightningModule, without ``configure_model``.

    Entries of module lists and sequences with at least ``min_shard_numel`` parameters are sharded one by one, the rest
    as one module. A module that shards itself in ``configure_model`` is used unchanged. With one rank nothing is
    compressed. ``sync_batchnorm=True`` works; callbacks that average weights in a copy of the module are refused.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        min_shard_numel, mp_policy, accumulate, process_group_backend, timeout: See `FSDPConstructor`.
        options: The fields of `SyncOptions`.
        save_distributed_checkpoint: True: a folder of shards; False: one full file, which ``load_from_checkpoint``
            reads.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """

    def setup(self, trainer: Any) -> None:
        """Set up like the stock strategy, but shard here instead of in ``configure_model``."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        fitting, self._sampler = trainer.state.fn == "fit", None  # data loaders are made later
        if fitting:
            _refuse_averaging(trainer.callbacks)
            if self._layer_sync is not None:  # sync_batchnorm=True
                self.model = self._layer_sync.apply(self.model)
            prepared = prepare(self.model, self.compressor, self.options, scatter=True)
        manual = not self.lightning_module.automatic_optimization  # backward runs inside training_step
        self.shard(self.model, self.device_mesh, self.precision_plugin, by_child=manual)
        self.barrier()
        if fitting:
            self.take_over(self._attached(attach_fsdp, self.model, prepared))
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._move_optimizers()

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer
        if self.model is None or trainer is None or self.global_rank > 0:
            return
        if sentence := cost_of_accumulation(self.model, trainer.accumulate_grad_batches, self.accumulate):
            inform("%s", sentence)

    def on_validation_end(self) -> None:
        """Reshard weights that FSDP2 leaves gathered, since callbacks look for the optimizer's parameters in the model,
        and a learning rate finder loads a checkpoint.
        """
        super().on_validation_end()
        assert self.model is not None
        reshard(self.model)

    def _move_optimizers(self) -> None:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if hasattr(value, "to"):
                        state[key] = value.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A context for gradient accumulation. Stock Lightning supports only DDP, and lets FSDP2 reduce every
        micro-batch.

        ``local``: FSDP2 keeps unsharded gradients and sends nothing before the last micro-batch. ``reduce``: gradients
            are reduced each time; weights still travel once per step.
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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save to rank 0's path, as the stock strategy does because all ranks write. Residuals use the same path."""
        super().save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def teardown(self) -> None:
        if self.model is not None:
            end_iteration(self.model)
        super().teardown()


def _refuse_averaging(callbacks: list[Any]) -> None:
    """Raise a ValueError if a callback averages weights in a copy of the module."""
    for callback in callbacks:
        if averages_weights(callback):
            raise ValueError(
                f"{type(callback).__name__} averages weights in a copy of the whole module, and FSDP2 keeps a shard of"
                " them on each rank: use a DDP strategy such as loco_ddp with it, or average the checkpoints afterwards"
            )


def averages_weights(callback: Any) -> bool:
    """Whether it is, or derives from, one of Lightning's callbacks that copy the module, in either namespace."""
    names = {base.__name__ for base in type(callback).__mro__}
    return not names.isdisjoint(("StochasticWeightAveraging", "WeightAveraging"))
