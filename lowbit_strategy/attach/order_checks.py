"""The order in which a training loop of one's own calls: each mistake has an error that names it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import canonical_name, describe_parameters

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
NEVER_ATTACHED = (
    "prepare was called for this model and nothing has been attached to it, so that its gradients are not compressed:"
    " call attach_ddp or attach_fsdp with the wrapped model before the first step, or compress(model, optimizer)"
)


def check_bare(module: nn.Module) -> None:
    """Raises:
    ValueError: `module` has been wrapped already, in a way that hides its parameters' names.
    """
    if isinstance(module, (DistributedDataParallel, DataParallel, FullyShardedDataParallel)):
        kind = type(module).__name__
        others = {DistributedDataParallel: "then wrap it", DataParallel: "and wrap it in DistributedDataParallel"}
        then = others.get(type(module), "and shard it with fully_shard: FSDP1 cannot be compressed")
        raise ValueError(f"prepare was given a {kind}: give it the bare model, {then}")


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


def check_fsdp(module: nn.Module, *, scatter: bool) -> None:
    """Raises:
    ValueError: The model was prepared for DDP, or is wrapped in it.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError("attach_fsdp was given a DistributedDataParallel: for DDP it is attach_ddp")
    if not scatter:
        raise ValueError("the model was prepared for DDP: give prepare scatter=True, which attach_fsdp needs")


def _shape(shape: Sequence[int] | None) -> str:
    return "missing or frozen" if shape is None else str(list(shape))


def why_nothing_was_sent(module: nn.Module, *, waits: bool) -> str:
    """After a first step in which nothing was. `waits`: DDP waits for all gradients."""
    params = [(canonical_name(name), param) for name, param in module.named_parameters() if param.requires_grad]
    idle = [name for name, param in params if param.grad is None]
    if waits and 0 < len(idle) < len(params):
        more = " ..." if len(idle) > 3 else ""
        return (
            f"the loss does not depend on {', '.join(idle[:3])}{more}, and DDP waits for all gradients before it"
            " synchronises: pass find_unused_parameters=True (or a name like loco_ddp_find_unused_parameters_true)"
        )
    return (
        "the optimizer has stepped but no gradient has been synchronised yet. If the first loss was not skipped on"
        " purpose, backward does not reach what was set up"
    )


def unfrozen_under_ddp(name: str) -> str:
    """What is wrong, and what to do."""
    return (
        f"{name} was frozen when the model was set up and is trained now, which DDP does not see: set the model up"
        " again after unfreezing, by fabric.setup(module, optimizer) or accelerator.prepare(module), with the module"
        " itself and not with what these returned"
    )
