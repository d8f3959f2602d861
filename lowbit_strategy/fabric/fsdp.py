"""FSDP2 under Fabric for any module, gradients compressed; independent of the Fabric namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowbit_strategy.attach.attach import attach_fsdp
from lowbit_strategy.attach.optimizer_checks import check_optimizers
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.strategy_options import FSDPConstructor
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.checkpoint.loading import explain_mismatch, optimizers_without_state
from lowbit_strategy.fabric.base_strategy import LowBitFabricMixin
from lowbit_strategy.fabric.bases import ModelParallelStrategy
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, reshard, shard_any
from lowbit_strategy.options.documentation import documented_options

_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class _ReducesAlways:
    """In the place of Fabric's own: every micro-batch is reduced, whatever ``no_backward_sync`` asks for."""

    def __init__(self, strategy: LowBitFabricMixin) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        yield
        for session in self._strategy.sessions if enabled else ():  # no optimizer steps on what has been reduced
            if session.serves(module):
                session.weights_unchanged()


@documented_options(SyncOptions)
class LowBitFabricFSDPMixin(LowBitFabricMixin, FSDPConstructor, ModelParallelStrategy):
    """FSDP2 with compressed gradient reduce-scatter, for any module. With one rank nothing is compressed.

    Args:
        compressor: A configuration such as ``LoCo(bits=4)``, the default, or a preset's name such as ``"loco2"``.
        @SyncOptions: seed, weights, shard_size and all others; what they do is filled in from there.
        min_shard_numel: Smallest block that is gathered and reduced by itself. Smaller: less memory, more messages.
        save_distributed_checkpoint: True: a folder of shards; False: one full file.
        process_group_backend, timeout: As for ``ModelParallelStrategy``.

    Raises:
        TypeError: An option is unknown, or one of FSDP1 (the message names what to do instead).
        ValueError: An option is out of range.
    """

    def stock_options(self) -> dict[str, Any]:
        return {"parallelize_fn": self._shard}

    def _shard(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        policy = ShardPolicy(
            min_numel=self.min_shard_numel,
            forward_methods=_FORWARD_METHODS,
            mp_policy=self.policy_of(self.precision),
        )
        shard_any(module, device_mesh["data_parallel"], self.root_device, policy)
        return module

    def on_configured(self) -> None:
        super().on_configured()
        if self.accumulate == "reduce":
            self._backward_sync_control = _ReducesAlways(self)  # type: ignore[assignment]

    def setup_module(self, module: nn.Module) -> nn.Module:
        if not any(param.requires_grad for param in module.parameters()):
            return super().setup_module(module)
        prepared = prepare(module, self.compressor, self.options, scatter=True)
        wrapped = super().setup_module(module)
        self.attach(
            attach_fsdp(
                wrapped,
                prepared,
                device=self.root_device,
                group=self.all_ranks,
                has_scaler=self.loss_scaler is not None,
            )
        )
        return wrapped

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Sharding replaces parameters: point the optimizers, made before it, at the new ones, by name.

        Raises:
            ValueError: An optimizer has state already, which belongs to the unsharded parameters.
        """
        names = {id(param): name for name, param in module.named_parameters()}
        wrapped = self.setup_module(module)
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            if optimizer.state:
                raise ValueError("set the model and optimizer up before the first step: this optimizer has state")
            check_optimizers(self.compressor, self.options, [optimizer])
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(param)]] for param in group["params"]]
        return wrapped, optimizers, scheduler

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        for value in state.values():
            if isinstance(value, nn.Module):
                reshard(value)  # a validation leaves the outermost module gathered
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        entries = state.items() if isinstance(state, dict) else ()
        modules = {key: value for key, value in entries if isinstance(value, nn.Module)}
        with explain_mismatch(path, modules), optimizers_without_state(self):
            return super().load_checkpoint(path, state, *args, **kwargs)
