"""Functions for a training loop without a framework. `compress` is enough; to do it by hand, call in this order:

1. `prepare` before the model is wrapped, then `attach_ddp` or `attach_fsdp` after it, which return a `Session`
2. `adapt` for a controller, `monitor` for observation and a record; both take ``session.sync``
3. ``session.load`` of a checkpoint, if there is one
4. ``session.begin_step`` before every backward pass, ``session.end_step`` after every optimizer step
5. ``with session.save(path) as stamp:`` around writing each checkpoint, ``session.close`` at the end
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.mistakes import MADE_BEFORE_SHARDING
from lowbit_strategy.attach.own_checkpoints import OwnCheckpoints
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import CHECKPOINT_KEY, Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.control.base import Controller, Progress
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.backward import before_backward
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.model.mesh import by_mesh, shard_group
from lowbit_strategy.model.parameters import named_parameters
from lowbit_strategy.model.sharded import sharded_groups
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import takes_options_of
from lowbit_strategy.telemetry.observe import Observer

__all__ = [
    "CHECKPOINT_KEY",
    "AdaptiveDriver",
    "GradientSync",
    "LoopClock",
    "MonitorOptions",
    "Observer",
    "Session",
    "SyncOptions",
    "adapt",
    "attach_ddp",
    "attach_fsdp",
    "compress",
    "control_of",
    "monitor",
    "prepare",
]


@dataclass(eq=False)
class LoopClock:
    """Counts the steps and epochs of a training loop that no framework counts.

    Args:
        optimizer: The optimizer whose learning rate controllers see.
        num_steps: Number of planned optimizer steps, needed for phases given as fractions.
        steps_per_epoch: Optimizer steps per epoch, used to count epochs. None: set `epoch` yourself.

    Attributes:
        epoch: The epoch, if the loop sets it, for controllers that count in epochs; None: steps are counted.
    """

    optimizer: Optimizer | None = None
    num_steps: int | None = None
    steps_per_epoch: int | None = None
    epoch: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("num_steps", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)

    def __call__(self, step: int) -> Progress:
        epoch = self.epoch
        if epoch is None and self.steps_per_epoch is not None:
            epoch = step // self.steps_per_epoch
        return Progress(
            step=step,
            epoch=epoch,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            learning_rate=self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else None,
        )


def control_of(sync: GradientSync) -> ModelControl:
    """This engine's control, made if there is none yet. Set its ``loss`` before each step to record the loss."""
    return ModelControl.of(sync) or ModelControl(sync)


def adapt(sync: GradientSync, controller: Controller, clock: Callable[[int], Progress] | None = None) -> AdaptiveDriver:
    """Let a controller choose compressors from the next step on. Call this before loading a checkpoint.

    Other decisions of the controller are in the driver's ``accumulation`` and ``learning_rate_factor``; the loop must
    apply them.

    Args:
        sync: The engine, ``session.sync``.
        controller: One of `lowbit_strategy.control`.
        clock: Reports the progress at each step, such as a `LoopClock`. None: only steps are counted.

    Raises:
        ValueError: The controller does not support this model, or there is one already.
    """
    return control_of(sync).adapt(controller, clock)


@takes_options_of(MonitorOptions)
def monitor(
    sync: GradientSync,
    log: Callable[[dict[str, float], int], Any] | None,
    *args: int | MonitorOptions,
    record: str | Path | None = None,
    **kwargs: Any,
) -> Observer:
    """Call ``log(metrics, step)`` on every rank after each observed step, and whenever a controller decides.

    Args:
        sync: See `adapt`.
        log: A function such as ``fabric.log_dict`` or ``accelerator.log``. None: only the record is written.
        args: A `MonitorOptions`, or its arguments.
        kwargs: Its arguments by name.
        record: A folder where rank 0 keeps the record that `lowbit report` draws.

    Raises:
        TypeError: There is no such option.
        ValueError: An option has the wrong type or is out of range, or there is a monitor already.
    """
    folder = None if record is None else Path(record)
    return control_of(sync).monitor(MonitorOptions.of(*args, **kwargs), log=log, folder=folder)


def compress(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    compressor: Compressor | str | None = None,
    *,
    scaler: Any = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Session:
    """Compress the gradient synchronization of a model in a training loop without a framework. Call it on every rank
    that holds part of the model. DDP or FSDP2 determines which ranks average its gradients.

    1. the ranks compare model, options and versions, and compression is attached
    2. every backward pass calls the session's ``begin_step``
    3. every step of `optimizer` calls the session's ``end_step``

    Args:
        model: Wrapped in ``DistributedDataParallel``, or sharded with ``fully_shard``.
        optimizer: Every optimizer that steps parameters of `model`, made after sharding.
        compressor: A configuration or a preset's name; None: the default of `options`, ``LoCo()``.
        scaler: The ``GradScaler``, if there is one.
        mesh: The mesh of all ranks that hold part of `model`, needed only for tensor parallelism without ``DTensor``.
        options: The fields of `SyncOptions`.

    Returns:
        The session: use ``save`` and ``load`` for checkpoints, ``finish`` after training, and in rounds
        ``shared_weights`` around validation.

    Raises:
        TypeError: An option is unknown.
        ValueError: `model` is neither wrapped nor sharded, an optimizer steps none of its parameters, or options are
            incompatible.
        RuntimeError: The ranks differ.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    bare, group, shard_size = _synchronized(model)
    sync_options = SyncOptions(**options)
    if sync_options.comes_and_goes:
        raise ValueError("compress does not support replicas that come and go: call prepare and attach_replica")
    if sync_options.shard_size is None:
        sync_options = replace(sync_options, shard_size=shard_size)
    compressor = sync_options.default_compressor if compressor is None else as_compressor(compressor)
    sync_options.check_optimizers(compressor, optimizers)
    params = {id(param) for _, param in named_parameters(bare)}
    if any(not params & {id(p) for group in each.param_groups for p in group["params"]} for each in optimizers):
        raise ValueError(MADE_BEFORE_SHARDING)
    prepared = prepare(bare, compressor, sync_options, scatter=bare is model, group=group)
    attach: Any = attach_fsdp if prepared.scatter else attach_ddp
    session: Session = attach(model, prepared, mesh=mesh, has_scaler=scaler is not None)
    session.bind(lambda: optimizers, lambda: scaler)
    session.end_after(optimizers)
    _begin_with_backward(model, session, scaler)
    session.resume()
    OwnCheckpoints(session).watch(optimizers)
    return session


def _synchronized(model: nn.Module) -> tuple[nn.Module, dist.ProcessGroup, int | None]:
    """Return the model without DDP around it, the ranks that have the same parameters or shards of them, and under HSDP
    the number that share one model.

    Raises:
        ValueError: `model` is neither wrapped nor sharded, or is wrapped twice.
    """
    if isinstance(model, DistributedDataParallel):
        if isinstance(model.module, DistributedDataParallel | DataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"compress was given a DistributedDataParallel around a {type(model.module).__name__}, which"
                " also synchronizes: wrap the model once, in DistributedDataParallel"
            )
        return model.module, model.process_group, None
    if not (groups := sharded_groups(model)):
        raise ValueError(
            f"compress was given a {type(model).__name__} that nothing synchronizes: give it what"
            " DistributedDataParallel returned, or a module that was sharded with fully_shard"
        )
    own = by_mesh(groups)[0][0]
    group = shard_group(own)
    return model, group, dist.get_world_size(group) if own.mesh.ndim > 1 else None


def _begin_with_backward(model: nn.Module, session: Session, scaler: Any) -> None:
    """Let every backward pass begin a step; gradients may be cleared until then. The session lives as long as the
    model.

    Under DDP, one rank alone may run a pass through the unwrapped module, so ranks meet only when DDP has gradients.
    """
    weak = weakref.ref(session)
    is_ddp = isinstance(model, DistributedDataParallel)
    held = None if is_ddp else session  # DDP holds it as long as it lives

    def begin() -> None:
        current = weak() if held is None else held
        if current is not None and not current.is_closed:
            current.begin_pass()
            if not is_ddp:
                current.begin_reducing(scaler)

    def begin_late() -> None:
        if (current := weak()) is not None:
            current.begin_reducing(scaler)

    session.sync.begin_late_with(begin_late)
    before_backward(model, begin)
