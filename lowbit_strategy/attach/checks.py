"""Checks for mistakes in a training loop, and for optimizers and clipping that a compressor cannot serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync, in_backward
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.parameters import describe_parameters, named_parameters

MANY_PASSES = 100  # of one step: more than anyone accumulates
NO_STEP_HAS_ENDED = (
    f"{MANY_PASSES} backward passes have come and no step has ended: call session.end_step() after every step, also one"
    " that is written by hand (in Lightning trainer.strategy.session.end_step()). Until then nothing is compared or"
    " recorded, no controller decides, and local steps have no turn"
)

MADE_BEFORE_SHARDING = (
    "the optimizer steps no parameter of this model: give it the model's parameters, after fully_shard, which replaces"
    " them"
)
CLIPPED_AFTERWARDS = (
    "{}={} clips the sparse mean gradient after it has left the residual, so what is clipped away is lost: raise it, or"
    " clip before compression (DGC(clip_norm=...))"
)
NEVER_ATTACHED = (
    "prepare was called for this model and nothing has been attached to it, so that its gradients are not compressed:"
    " call attach_ddp or attach_fsdp with the wrapped model before the first step, or compress(model, optimizer)"
)
ONE_REPLICA = (
    "lowbit_strategy: one replica: the model is sharded over all ranks, inside of which gradients are added up exactly,"
    " so nothing is compressed, and no steps are local. Start several nodes. To try it on one, give a smaller"
    " shard_size, or start the ranks with LOCAL_WORLD_SIZE set to fewer than they are"
)


def check_ddp(model: nn.Module, specs: Sequence[TensorSpec], *, scatter: bool) -> None:
    """Raises:
    ValueError: `model` is not what was prepared, wrapped in DDP.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach_ddp was given a {type(model).__name__}: give it what DistributedDataParallel returned for the"
            " prepared model (for fully_shard it is attach_fsdp)"
        )
    if scatter:
        raise ValueError(
            "the model was prepared with scatter=True, which is for attach_fsdp: leave scatter out for DDP"
        )
    found = {spec.name: spec.shape for spec in describe_parameters(model.module)}
    expected = {spec.name: spec.shape for spec in specs}
    if found != expected:
        name = next(name for name in {**found, **expected} if found.get(name) != expected.get(name))
        raise ValueError(
            f"attach_ddp was given another model than prepare: {name} is {_shape(found.get(name))} in one and"
            f" {_shape(expected.get(name))} in the other. Prepare the model that is wrapped, after freezing what is not"
            " trained"
        )


def check_whole_model(module: nn.Module, sync: GradientSync) -> None:
    """Raises:
    ValueError: A method selects from all of a rank's parameters, while tensor or expert parallelism gives ranks
        different parts of some and the same copy of another.
    """
    if sync.ranks.world.world_size == sync.ranks.world_size:
        return
    for name, param in named_parameters(module):
        assignment = sync.state.assignments.get(name)
        if assignment is None or not assignment.method.whole_model:
            continue
        if getattr(param, "_st_info", param).shape.numel() == sync.specs[name].whole.numel:
            raise ValueError(
                f"{sync.compressor.name} selects from all parameters of a rank, whose others differ by tensor"
                f" parallelism, and {name} is the same on all ranks, which would select other parts of it: exempt it,"
                " or take a compressor that looks at one parameter at a time, such as LoCo()"
            )


def _shape(shape: Sequence[int] | None) -> str:
    return "missing or frozen" if shape is None else str(list(shape))


def why_nothing_was_sent(module: nn.Module, *, waits: bool) -> str:
    """Explain a first step in which nothing was sent. `waits`: whether DDP waits for all gradients."""
    params = [(name, param) for name, param in named_parameters(module) if param.requires_grad]
    idle = [name for name, param in params if param.grad is None]
    if waits and 0 < len(idle) < len(params):
        more = " ..." if len(idle) > 3 else ""
        return (
            f"the loss does not depend on {', '.join(idle[:3])}{more}, and DDP waits for all gradients before it"
            " synchronizes: pass find_unused_parameters=True (or a name like loco_ddp_find_unused_parameters_true)"
        )
    return (
        "the optimizer has stepped but no gradient has been synchronized yet. If the first loss was not skipped on"
        " purpose, backward does not reach what was set up"
    )


def unfrozen_under_ddp(name: str) -> str:
    """The message that says what is wrong and what to do."""
    return (
        f"{name} was frozen when the model was set up and is trained now, which DDP does not see: set the model up"
        " again after unfreezing, by fabric.setup(module, optimizer), accelerator.prepare(module), or in plain PyTorch"
        " DistributedDataParallel(module) and compress, with the module itself and not with what these returned"
    )


def check_optimizers(compressor: Compressor, options: SyncOptions, optimizers: Iterable[Optimizer]) -> None:
    """Raises:
    ValueError: An optimizer's momentum conflicts with the compressor's, it lacks what the options need, or it exchanges
        weights itself with local steps.
    """
    for optimizer in optimizers:
        compressor.check_optimizer(optimizer)
        for part in options.parts:
            part.check_optimizer(optimizer)


def check_synchronizes(model: DistributedDataParallel) -> None:
    """Check, when an optimizer has stepped, that DDP synchronized the gradients of `model`.

    Raises:
        RuntimeError: DDP was told not to synchronize, or has not done so yet.
    """
    if in_backward():
        raise RuntimeError(
            "an optimizer has stepped inside the backward pass, before DistributedDataParallel has averaged the"
            " gradients: each rank would train on its own. Step after backward, or shard the model with fully_shard,"
            " where hooks of parameters are called with averaged gradients"
        )
    if not model.require_backward_grad_sync:
        raise RuntimeError(
            "an optimizer has stepped inside no_sync(): each rank has trained on its own gradients, and nothing was"
            " sent or compressed. Leave no_sync() before the last backward pass of a step. If ranks are to train by"
            " themselves and meet every so many steps, as with Accelerate's LocalSGD, leave that out and give the"
            " strategy or the plugin outer=LocalSGD(every=8), of lowbit_strategy"
        )
