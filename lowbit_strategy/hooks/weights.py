"""FSDP2: an all-gather of every sharded module that goes through a `WeightSync`.

What all ranks must agree on without asking each other is decided by what happens on all of them alike:

| moment | what is kept of the weights |
|---|---|
| a step has ended | is old: the next gather sends |
| an optimizer has stepped that has some of a module's parameters | is old for that module |
| other weights have been loaded | is old; differences begin anew |
| the root module is in evaluation mode | is not used: exact weights, as FSDP2 gathers them |

A backward pass gathers as its forward pass did. Weights that were changed within a step in another way are an error,
not a silent use of old ones.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy.collectives.gathering import Gathering
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.weights import WeightSync
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.model.fsdp_sharding import ShardedGroup, sharded_groups
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, is_float
from lowbit_strategy.plan.weights import ModuleLayout


class CodedAllGather(DefaultAllocMixin, torch.distributed.fsdp._fully_shard._fsdp_api.AllGather):
    """The custom communication of one FSDP2 parameter group: input ``[n]``, output ``[W * n]``.

    Args:
        weights: The model's.
        name: Of the module in it.
        group: The module.
        root: Whose mode decides: coded in training, exact in evaluation.
        order: Orders the streams that touch what is kept.
    """

    def __init__(
        self, weights: WeightSync, name: str, group: ShardedGroup, root: nn.Module, order: _StreamOrder
    ) -> None:
        self._weights = weights
        self._name = name
        self._params = group.param_group
        self._root = weakref.ref(root)
        self._order = order
        self._stock = DefaultAllGather()
        self._coded = False  # how the last forward pass gathered
        self._versions: list[int] = []
        self.ids = {id(param.sharded_param) for param in group.param_group.fsdp_params}

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        training = self._in_training()
        module = self._weights.modules[self._name]
        # after reshard_after_forward=int the smaller group's shards are of what was decoded
        if not training or not module.is_ours or self._params.is_sharded_post_forward:
            self._weights.count_exact(input_tensor.nbytes * (group.size() - 1), training=training)
            return self._stock(output_tensor, input_tensor, group, async_op)
        if module.gather.fresh:
            self._check_unchanged()
        else:
            self._versions = self._present_versions()
        with self._order.ordered():
            for pending in self._weights.run(self._name, input_tensor, output_tensor):
                pending.wait()
        return None

    def invalidate(self) -> None:
        self._weights.modules[self._name].gather.invalidate()

    def _in_training(self) -> bool:
        if self._params._training_state != TrainingState.PRE_BACKWARD:
            root = self._root()
            self._coded = root is not None and root.training
        return self._coded

    def _present_versions(self) -> list[int]:
        params = [param.sharded_param for param in self._params.fsdp_params]
        return [version for param in params for version in (param._version, param._local_tensor._version)]

    def _check_unchanged(self) -> None:
        if self._present_versions() != self._versions:
            raise RuntimeError(
                f"parameters of {self._name or 'the model'} were changed within a step, after its weights had been"
                " sent, and not by an optimizer of torch.optim: change them between steps, or call"
                " attached.weights_changed() on all ranks afterwards (or pass weights=Exact())"
            )


class _StreamOrder:
    """On CUDA a gather may run on another stream than the one before; both touch what is kept."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device

    @contextlib.contextmanager
    def ordered(self) -> Iterator[None]:
        if self._event is None:
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        yield
        self._event.record(stream)


def install_weights(module: nn.Module, coding: WeightCoding, sync: GradientSync, comm: Gathering) -> None:
    """Give every FSDP2 module under `module` its all-gather.

    Args:
        module: The model.
        coding: How weights travel.
        sync: The engine: its steps end those of the weights, and their state is saved with its own.
        comm: How messages travel to the ranks that share the weights.
    """
    groups = {each.name: each for each in sharded_groups(module)}
    specs = _specs(module)
    names = {id(param): canonical_name(name) for name, param in module.named_parameters()}
    layouts = {name: _layout(each, names, specs) for name, each in groups.items()}
    weights = WeightSync(coding, layouts, comm, sync.device)
    order = _StreamOrder(sync.device)
    gathers = [CodedAllGather(weights, name, each, module, order) for name, each in groups.items()]
    for gather, each in zip(gathers, groups.values(), strict=True):
        each.module.set_custom_all_gather(gather)
    _watch(module, weights, gathers)
    sync.weights = weights
    sync.extra_state["weights"] = weights


def _specs(module: nn.Module) -> Mapping[str, TensorSpec]:
    """Of all parameters that can be coded, frozen ones too."""
    floats = {canonical_name(name) for name, param in module.named_parameters() if is_float(param)}
    return {spec.name: spec for spec in describe_parameters(module, floats)}


def _layout(group: ShardedGroup, names: Mapping[int, str], specs: Mapping[str, TensorSpec]) -> ModuleLayout:
    params = group.param_group.fsdp_params
    chosen = group.param_group.mp_policy.param_dtype
    own = [names[id(param.sharded_param)] for param in params]
    dtypes = {chosen or param.sharded_param.dtype for param in params if param.sharded_param.is_floating_point()}
    extended = any(hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather") for param in params)
    coded = len(dtypes) == 1 and not extended and all(name in specs for name in own)
    unknown = [
        TensorSpec(name, tuple(param.sharded_param.shape))
        for name, param in zip(own, params, strict=True)
        if name not in specs
    ]
    known = {**specs, **{spec.name: spec for spec in unknown}}
    return ModuleLayout(
        specs=tuple(known[name] for name in own),
        dtype=dtypes.pop() if coded else params[0].sharded_param.dtype,
        num_gathers=2 if group.gathered_in_backward else 1,
        coded=coded,
    )


_watched: weakref.WeakSet[CodedAllGather] = weakref.WeakSet()


def _watch(module: nn.Module, weights: WeightSync, gathers: list[CodedAllGather]) -> None:
    """From now on optimizer steps and loading make what is kept old."""
    if not _hooked:
        _hooked.append(register_optimizer_step_post_hook(_on_optimizer_step))
    _watched.update(gathers)
    reference = weakref.ref(weights)

    def on_load(*_: Any) -> None:
        if (found := reference()) is not None:
            found.forget()

    for child in module.modules():
        if child._parameters:
            child.register_load_state_dict_post_hook(on_load)


_hooked: list[Any] = []  # once per process


def _on_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for gather in list(_watched):
        if not stepped.isdisjoint(gather.ids):
            gather.invalidate()
