"""The order in which a training loop of one's own calls: each mistake has an error that names it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import describe_parameters


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
