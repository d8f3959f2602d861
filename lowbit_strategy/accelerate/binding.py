"""Binds a plugin to one `Accelerator` by wrapping the methods at which compression must act.

| wrapped method | added behavior |
|---|---|
| `prepare_model`, and `_prepare_fsdp2` for FSDP2 | handshake before, attachment after |
| `prepare_optimizer` | the optimizer reports when a step has ended, even a skipped one |
| `backward` | residuals are first told the loss scale, controllers the progress |
| `accumulate` | notes that it is used, for controllers that change the batch |
| `clip_grad_norm_`, `clip_grad_value_` | a warning with sparse methods |
| `init_trackers` | the run's hyperparameters name the compressor |
| `save_state`, `load_state` | residuals go into the folder, through Accelerate's own hooks |
| `get_state_dict`, `load_state`, `end_training` | in rounds: the weights that all ranks share are saved |
| `free_memory` | attachments are freed with the models |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from lowbit_strategy.accelerate import checkpoint_folder
from lowbit_strategy.accelerate.models import PreparedModels
from lowbit_strategy.accelerate.optimizer import SteppingOptimizer
from lowbit_strategy.accelerate.prepared_control import AcceleratorLoop
from lowbit_strategy.accelerate.supported import check_accelerator
from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.attach.session import Session
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.inform import inform
from lowbit_strategy.model.sharded import end_iteration, reshard
from lowbit_strategy.ranks.topology import ShardSize, find_topology, resolve_shard_size

_ATTRIBUTE = "lowbit"


class Binding:
    """Returned by `LowBitPlugin.attach`, and then available as ``accelerator.lowbit``.

    Args:
        plugin: The `LowBitPlugin`.
        accelerator: An accelerator that has prepared nothing yet.
        fsdp_plugin: See `LowBitPlugin.attach`.
        of_section: Whether the plugin comes from a `lowbit_config` section; if so, the script's plugin may replace it.

    Raises:
        ValueError: See `LowBitPlugin.attach`.
    """

    def __init__(
        self, plugin: Any, accelerator: Accelerator, *, fsdp_plugin: Any = None, of_section: bool = False
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"attach needs an accelerate.Accelerator, got {type(accelerator).__name__}")
        if (present := binding_of(accelerator)) is not None and not present._of_section:
            raise ValueError("this Accelerator already has a LowBitPlugin: attach only one")
        if accelerator._models or accelerator._optimizers or (present is not None and present._models.attached):
            raise ValueError(
                "this Accelerator has already prepared a model or an optimizer, which would stay uncompressed:"
                " attach the plugin right after making the Accelerator, before accelerator.prepare"
            )
        if present is not None:
            present._make_room()
        check_accelerator(accelerator, fsdp_plugin)
        self.plugin = plugin
        self.accelerator = accelerator
        self._of_section: bool = of_section
        self._before = (accelerator.state.parallelism_config, accelerator.state.device_mesh)
        shard_size = choose_shard_size(accelerator, plugin.shard_size)
        self._options = dataclasses.replace(plugin.sync_options(), shard_size=shard_size)
        self.loop = AcceleratorLoop(plugin, accelerator)
        self._models: PreparedModels = PreparedModels(self.loop, self._options)
        before = dict(vars(accelerator))
        wrap_method(accelerator, "prepare_model", self._models.prepare_model)
        wrap_method(accelerator, "_prepare_fsdp2", self._models.prepare_fsdp2)
        wrap_method(accelerator, "prepare_optimizer", self._prepare_optimizer)
        wrap_method(accelerator, "backward", self._backward)
        wrap_method(accelerator, "accumulate", self._accumulate)
        wrap_method(accelerator, "clip_grad_norm_", functools.partial(self._clip, "max_norm"))
        wrap_method(accelerator, "clip_grad_value_", functools.partial(self._clip, "clip_value"))
        wrap_method(accelerator, "init_trackers", self._init_trackers)
        wrap_method(accelerator, "free_memory", self._free_memory)
        wrap_method(accelerator, "get_state_dict", self._get_state_dict)
        wrap_method(accelerator, "load_state", self._load_state)
        wrap_method(accelerator, "end_training", self._end_training)
        if (adapter := plugin.adapter("accelerate")) is not None:
            self._models.replica = adapter.ReplicaBinding(self)
        self._saving = contextlib.ExitStack()
        wrap_method(accelerator, "save_state", self._save_state)
        self._hooks = (
            accelerator.register_save_state_pre_hook(
                lambda models, weights, folder: self._saving.enter_context(self.save(folder))
            ),
            accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder)),
        )
        setattr(accelerator, _ATTRIBUTE, self)
        self._added = [name for name in vars(accelerator) if name not in before]

    def _make_room(self) -> None:
        """Undo the binding, because the script attaches its own plugin before anything has been prepared."""
        if self.accelerator.is_main_process:
            inform("the script's own LowBitPlugin is used, not the lowbit_config section")
        for name in self._added:
            delattr(self.accelerator, name)
        for hook in self._hooks:
            hook.remove()
        self.accelerator.state.parallelism_config, self.accelerator.state.device_mesh = self._before

    @property
    def sessions(self) -> list[Session]:
        """The sessions of the prepared models that are in use."""
        return self._models.sessions

    @property
    def attached(self) -> Collection[nn.Module]:
        """The sessions of all models to which compression has been attached, in use or not."""
        return self._models.attached

    @property
    def replica(self) -> Any:
        """This replica, if replicas come and go; otherwise None."""
        return self._models.replica

    @property
    def sync(self) -> GradientSync | None:
        """The engine of the first prepared model: methods, state, accounting."""
        return self.sessions[0].sync if self.sessions else None

    @property
    def driver(self) -> AdaptiveDriver | None:
        """The running controller of the first prepared model: current levels, state."""
        control = ModelControl.of(self.sync) if self.sync is not None else None
        return None if control is None else control.driver

    @property
    def epoch(self) -> int | None:
        """The epoch, for controllers that need it. Set it in the loop if nothing else counts epochs."""
        return self.loop.clock.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.loop.clock.epoch = epoch

    @property
    def writes_checkpoints(self) -> bool:
        """Whether this process writes checkpoints. If replicas come and go, only the lowest one does."""
        return all(session.pace.writes_checkpoints for session in self.sessions)

    def end_step(self, optimizer: AcceleratedOptimizer) -> None:
        """Called by the prepared optimizers."""
        for session in self.sessions:
            if session.owns(optimizer):
                session.end_step(optimizer, self.accelerator.scaler)
                self._take_effect(session)

    def finish(self) -> None:
        """End training. Call it on all ranks, which then have the same weights.

        ``accelerator.end_training`` calls it, and so does the HF Trainer.
        """
        for session in self.sessions:
            session.finish()

    @contextlib.contextmanager
    def shared_weights(self, *, validates: bool = True) -> Iterator[None]:
        """A context in which models have the weights that all ranks share, for evaluation.

        Args:
            validates: Warn once if the last validation saw the same weights. False: for saving.
        """
        with contextlib.ExitStack() as models:
            for session in self.sessions:
                models.enter_context(session.shared_weights(validates=validates))
            yield

    def reshard(self, *, begins: bool = False) -> None:
        """FSDP2: free weights that a forward pass has left gathered, since parameters would be these instead of shards.

        `begins`: training begins, and an exception may have ended earlier training in the middle of a pass.
        """
        for module in self.attached:
            (end_iteration if begins else reshard)(module)

    def resume(self) -> None:
        """Call this on all ranks when a whole checkpoint has been loaded."""
        for session in self.sessions:
            session.resume()

    def save(self, folder: str) -> contextlib.AbstractContextManager[None]:
        """A context for writing a checkpoint, which puts this rank's residuals into its folder."""
        return checkpoint_folder.save(folder, self.sessions, writes_stamp=self.accelerator.is_local_main_process)

    def load(self, folder: str, *, compressed: bool = False) -> None:
        """Restore what `save` wrote. Call it on all ranks. `compressed`: it is an error if nothing was saved."""
        self.accelerator.wait_for_everyone()  # ranks write it without waiting: it may not be complete yet
        checkpoint_folder.load(folder, self.sessions, compressed=compressed)
        for session in self.sessions:
            self._take_effect(session)

    def _take_effect(self, session: Session) -> None:
        if (control := ModelControl.of(session.sync)) is not None:
            control.take_effect()

    @contextlib.contextmanager
    def scaled(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Iterator[Any]:
        """A context for a step of a prepared optimizer; see `ModelControl.scaled`."""
        with contextlib.ExitStack() as stack:
            for session in self.sessions:
                if (control := ModelControl.of(session.sync)) is not None and session.owns(optimizer):
                    closure = stack.enter_context(control.scaled(optimizer, closure))
            yield closure

    # -- the accelerator's wrapped methods ----------------------------------------------------------------------

    def _prepare_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        if self.sessions:
            self._options.check_optimizers(self.plugin.compressor, [optimizer])
        if type(optimizer) is AcceleratedOptimizer:
            optimizer.__class__ = SteppingOptimizer  # not a patched attribute: schedulers rebind `step`
            optimizer.lowbit = self
        self._models.revive_stepped_by(optimizer)
        return optimizer

    def _accumulate(self, original: Callable[..., Any], *models: Any) -> Any:
        self.loop.accumulates = True
        return original(*models)

    def _clip(self, option: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for session in self.sessions:
            session.clipped(kwargs[option] if option in kwargs else args[1], option)
        return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
        value = loss.detach() if isinstance(loss, Tensor) else None
        self.loop.clock.batch()
        for session in self.sessions:
            session.begin_step(self.accelerator.scaler, loss=value)
        return original(loss, **kwargs)

    def _init_trackers(self, original: Callable[..., Any], name: str, config: Any = None, **kwargs: Any) -> Any:
        return original(name, {**(config or {}), **self.plugin.hyper_parameters()}, **kwargs)

    def _free_memory(self, original: Callable[..., Any], *objects: Any) -> Any:
        self._models.sessions = []  # sessions close when their models are gone
        return original(*objects)

    def _get_state_dict(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        read = functools.partial(original, model, *args, **kwargs)
        for session in self.sessions:
            if session.serves(model):
                read = functools.partial(session.shared_state, read)
        return read()

    def _save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._saving:  # entered by the hook, which knows the folder
            return original(*args, **kwargs)

    def _load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.resume()
        return result

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.finish()
        return original()


def wrap_method(of: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace the method `name` of `of` by `around`, whose first argument is the original method."""
    original = getattr(of, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(of, name, method)


def binding_of(accelerator: Accelerator) -> Binding | None:
    """The binding of `accelerator`, if a plugin is attached."""
    binding = getattr(accelerator, _ATTRIBUTE, None)
    return binding if isinstance(binding, Binding) else None


def choose_shard_size(accelerator: Accelerator, shard_size: ShardSize | None) -> ShardSize | None:
    """The number of ranks that share one model, from Accelerate's ``dp_replicate_size`` or from `shard_size`.

    An accelerator without a parallelism config gets the plugin's value, and shards accordingly.

    Raises:
        ValueError: The two differ, or `shard_size` does not suit the nodes.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return shard_size  # if given, it is refused when the model is prepared
    config = accelerator.parallelism_config
    size = None if shard_size is None else resolve_shard_size(shard_size, find_topology())
    if config is not None and config.dp_replicate_enabled:
        num_sharing = config.dp_shard_size * config.cp_size
        if size not in (None, num_sharing):
            raise ValueError(
                f"shard_size={shard_size!r} of the plugin and dp_shard_size={config.dp_shard_size} of Accelerate's"
                " parallelism_config differ: leave one of them out"
            )
        return num_sharing
    if size is None:
        return None
    num_replicas = accelerator.num_processes // size
    if size == 1:
        raise ValueError("shard_size=1 leaves nothing to shard, which Accelerate does not allow: use DDP instead")
    if num_replicas > 1:
        config = ParallelismConfig(dp_replicate_size=num_replicas, dp_shard_size=size)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
    return size
