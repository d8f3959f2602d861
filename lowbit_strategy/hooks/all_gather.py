"""FSDP2: the all-gather of every sharded module, done by a `WeightSync`.

Whether a module's kept weights may be used follows from events that all ranks see, so that ranks need not ask each
other:

| moment | kept weights |
|---|---|
| the module's gradients have been reduced | used by the running backward passes; the next forward pass sends |
| a step has ended, or different weights have been loaded | old: the next gather sends |
| the root module is in evaluation mode | unused: FSDP2 gathers exact weights |

FSDP2 leaves the outermost module gathered after a forward pass. Without a backward pass, validation's weights would be
used in the next training step, so weights that an earlier forward pass left gathered are gathered again.

With far ranks, the first module that a forward pass gathers makes all others send their rows at once, instead of one
after the other.

A backward pass gathers in the same way as its forward pass. Each owner notes a digest of its row when it sends. It is
an error if weights change between a forward pass and its backward pass, no matter what changes them.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lowbit_strategy.collectives.comm import naming_lost_ranks, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.weight_sync import WeightSync
from lowbit_strategy.hooks.waiting import waiting
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.model.parameters import describe_parameters, is_float, named_parameters
from lowbit_strategy.model.sharded import ShardedGroup


class CodedAllGather(DefaultAllocMixin, torch.distributed.fsdp._fully_shard._fsdp_api.AllGather):
    """The custom communication of one FSDP2 parameter group: input ``[n]``, output ``[W * n]``.

    Args:
        weights: The model's weights.
        root: The module whose mode decides: coded in training, exact in evaluation.
        order: Orders the streams that use kept weights.
        sync: The engine, which measures when training waits.
    """

    def __init__(
        self,
        weights: WeightSync,
        group: ShardedGroup,
        root: nn.Module,
        order: _StreamOrder,
        sync: GradientSync,
    ) -> None:
        self._weights, self._sync = weights, sync
        self._name = group.name
        self._gather = weights.modules[group.name]
        self._params = group.param_group
        self._root = weakref.ref(root)
        self._order = order
        self._stock = DefaultAllGather()
        self._coded = False  # whether the last forward pass gathered codes
        self._has_run = False  # whether the previous forward pass gathered it
        self._trained: int | None = None  # version of the weights that the last forward pass used, if it was training
        self.together: Sequence[CodedAllGather] = ()  # modules that send their rows together with this one

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        in_forward = self._params._training_state != TrainingState.PRE_BACKWARD
        if in_forward:
            self._begin_forward()
        # after reshard_after_forward=int the smaller group shards decoded weights
        if not self._coded or not self._gather.is_ours or self._params.is_sharded_post_forward:
            return self._exact(output_tensor, input_tensor, group, async_op=async_op)
        if in_forward and not self._gather.fresh and not self._gather.in_flight:
            for each in sorted(self.together, key=lambda each: each is not self):  # send first what is needed first
                each.send_early()
        digest = self._checked_digest(input_tensor)
        with self._order.ordered(), waiting(self._sync):
            wait_for_all(self._gather.run(input_tensor, output_tensor, digest))
        return None

    def _exact(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> dist.Work | None:
        if self._coded:
            self._weights.count_exact(input_tensor.nbytes * (group.size() - 1))
        what = f"the all-gather of the exact weights of {self._name or 'the model'}"
        with naming_lost_ranks(group, what, self._weights.comms[0].between.describe_step()):
            return self._stock(output_tensor, input_tensor, group, async_op)

    def _is_training(self) -> bool:
        root = self._root()
        return root is not None and root.training

    def _begin_forward(self) -> None:
        self._coded = self._is_training()
        if self._coded:
            self._gather.begin_forward()
            self._has_run = True

    def send_early(self) -> None:
        """Send this rank's row early, when a different module is gathered, if optimizers have stepped on all modules
        and the forward pass is expected to gather this module, as the previous one did.
        """
        gather = self._gather
        if not (self._has_run and gather.keeps and self._params.is_sharded):  # if not kept, each forward sends it
            return
        self._gather.begin_forward()
        if gather.fresh or gather.in_flight:
            return
        row_N = torch.cat([part.view(-1) for each in self._params.fsdp_params for part in each.all_gather_inputs])
        gather.send_early(row_N, digests([row_N], row_N.device))

    def _checked_digest(self, row_N: Tensor) -> Tensor | None:
        """Check that the kept weights were made from this row, and return its digest; None: nothing is kept."""
        gather = self._gather
        if not gather.keeps:
            return None
        digest = digests([row_N], row_N.device)
        if (gather.fresh or gather.in_flight) and gather.sent_digest is not None:
            self._weights.flags.check_unchanged(gather.sent_digest, digest, self._name or "the model")
        return digest

    def reshard_leftovers(self, pre_forward: Callable[..., Any], *args: Any) -> Any:
        """Wrap `pre_forward`, so that it first reshards parameters that an earlier forward pass left gathered. In a
        step whose gradients have not been reduced, weights that another training pass left stay if a gather would send.
        """
        training, gather = self._is_training(), self._gather
        is_left = self._params._training_state == TrainingState.IDLE and self._params.is_unsharded
        stays = training and self._trained == gather.version and not gather.keeps
        if is_left and not stays:
            self._params.reshard()
        result = pre_forward(*args)
        self._trained = gather.version if training and torch.is_grad_enabled() else None
        return result


class _StreamOrder:
    """Orders gathers on CUDA, which may run on different streams and use the same kept weights."""

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


def make_weights(
    module: nn.Module, groups: Sequence[ShardedGroup], coding: WeightCoding, sync: GradientSync
) -> WeightSync:
    """The weights of FSDP2's modules. `groups`: the parts of the model that ranks share."""
    made = {ranks.peers: ranks.gathering(sharded_inside=not sync.sharded) for ranks in sync.all_ranks}
    layouts = module_layouts(module, groups)
    comms = {name: made[sync.state.ranks_of(layout.specs[0].name).peers] for name, layout in layouts.items()}
    return WeightSync(coding, layouts, comms, sync.device)


def install_gathers(module: nn.Module, groups: Sequence[ShardedGroup], weights: WeightSync, sync: GradientSync) -> None:
    """Give FSDP2 modules their all-gather. `groups`: see `make_weights`."""
    order = _StreamOrder(sync.device)
    gathers = {each.name: CodedAllGather(weights, each, module, order, sync) for each in groups}
    for each in groups:
        gather, comm = gathers[each.name], weights.modules[each.name].comm
        if comm.between.is_far:
            gather.together = [other for name, other in gathers.items() if weights.modules[name].comm is comm]
        each.param_group._all_gather_comm = gather
        stock = types.MethodType(type(each.param_group).pre_forward, each.param_group)  # not an earlier fit's
        each.param_group.pre_forward = functools.partial(gather.reshard_leftovers, stock)
    _forget_on_load(module, weights)
    sync.serve_weights(weights)


def module_layouts(module: nn.Module, groups: Iterable[ShardedGroup]) -> dict[str, ModuleLayout]:
    """The layout of each sharded module's parameters, by module name. `groups`: the sharded groups of `module`."""
    names = {id(param): name for name, param in named_parameters(module)}
    floats = {names[id(param)] for param in module.parameters() if is_float(param)}
    specs = {spec.name: spec for spec in describe_parameters(module, floats)}  # all codable parameters, frozen or not
    return {each.name: _layout(each, names, specs) for each in groups}


def _layout(group: ShardedGroup, names: Mapping[int, str], specs: Mapping[str, TensorSpec]) -> ModuleLayout:
    shapes = [tuple(param._orig_size) for param in group.param_group.fsdp_params]
    params: list[Any] = group.shards
    chosen = group.param_group.mp_policy.param_dtype
    dtypes = {chosen or param.dtype for param in params if param.is_floating_point()}
    extended = any(hasattr(param._local_tensor, "fsdp_pre_all_gather") for param in params)
    coded = len(dtypes) == 1 and not extended and all(names[id(param)] in specs for param in params)
    return ModuleLayout(
        specs=tuple(
            specs.get(names[id(param)]) or TensorSpec(names[id(param)], shape)
            for param, shape in zip(params, shapes, strict=True)
        ),
        dtype=dtypes.pop() if coded else params[0].dtype,
        num_gathers=2 if group.gathered_in_backward else 1,
        coded=coded,
    )


def _forget_on_load(module: nn.Module, weights: WeightSync) -> None:
    """Make loading a state dict mark kept weights as old."""
    reference = weakref.ref(weights)

    def on_load(*_: Any) -> None:
        if (found := reference()) is not None:
            found.loaded()

    for child in module.modules():
        if child._parameters:
            child.register_load_state_dict_post_hook(on_load)
