"""Receives the gradients of one FSDP2 module and hands them to the engine as buckets.

FSDP2 divides gradients by a given factor (``set_gradient_divide_factor``) or by the number of ranks. These classes do
the same, whenever the factor is set.

Under HSDP (sharded inside a node, replicated between nodes), FSDP2 shards over a one-dimensional mesh of the ranks that
share one model. After each module's exact reduce-scatter inside the node, it calls an all-reduce hook with this rank's
shard of the gradients, and the engine replaces the shard by its mean over the replicas. On CPU a worker thread does
this while backward continues, and the end of the backward pass waits for it; on CUDA it runs in its own stream, for
which FSDP2 waits.
"""

from __future__ import annotations

import functools
import itertools
import types
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.engine.backward_pass import in_backward
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.two_levels import Phases, reduce_scatter
from lowbit_strategy.hooks.overlap import OverlappedRunner
from lowbit_strategy.hooks.unused import Reduction, Reductions
from lowbit_strategy.hooks.waiting import waiting
from lowbit_strategy.model.sharded import reduce_dtype


class _ReduceScatter(DefaultAllocMixin, torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter):
    """The custom communication of one FSDP2 parameter group.

    It has a layout for each set of parameters that are trained together. A rank's row of gradients holds its shards of
    the parameters, one after the other. A bucket holds all ranks' rows or, under HSDP, this rank's row without
    parameters of which it has no part.

    FSDP2's settings are changed only while it reduces; the user's settings stay, and are read each time.

    Args:
        param_group: The module's parameter group.
        names: Its parameters' names, by the identity of FSDP2's records, which stay the same when a tensor is replaced
            on loading.
        reductions: The reductions of the pass.
        on_reduced: Called on all ranks when the group's gradients have been reduced.
    """

    def __init__(
        self, param_group: Any, names: Mapping[int, str], reductions: Reductions, on_reduced: Callable[[], None]
    ) -> None:
        self._param_group, self._names, self._on_reduced = param_group, names, on_reduced
        self._reductions, self._sync, self._ranks = reductions, reductions.sync, reductions.ranks
        self._overlapped = reductions.overlapped
        self._rows: dict[tuple[str, ...], tuple[BucketLayout, int]] = {}  # a layout, and its row's size
        self._marks: Tensor | None = None  # marks of the current reduction
        self._is_read_at_once = False
        self._has_waiting = False  # gradients of passes that were not reduced, which a pipeline reduces at its end

    def install(self) -> None:
        """Have FSDP2 reduce through this."""
        group = self._param_group
        group._reduce_scatter_comm = self
        stock = types.MethodType(type(group).post_backward, group)  # the stock method, not an earlier fit's wrapper
        group.post_backward = functools.partial(self._post_backward, stock)

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """The values that the parameter group's attributes need while FSDP2 reduces, given the user's settings."""

    def _post_backward(self, stock: Callable[..., Any], *args: Any) -> Any:
        """Replaces FSDP2's method for the end of a module's backward. First, parameters without a gradient get zeros.

        A pipeline also calls it at its end, even after an evaluation without a backward pass.
        """
        group = self._param_group
        params = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        has_gradients, self._has_waiting = in_backward() or self._has_waiting, not group.reduce_grads
        has_gradients = has_gradients and any(hasattr(param, "_unsharded_param") for param in params)
        if not (group.reduce_grads and has_gradients):
            return stock(*args)
        absent = {self._names[id(param)] for param in params if not _fill(param)}
        # before hooks are held back: the same on all ranks
        self._is_read_at_once = group._all_reduce_hook is not None or is_read_at_once(group)
        reduction = self._begin(params, absent)
        self._marks = reduction.marks
        own = self._settings()
        users = {name: getattr(group, name) for name in own}
        reduction.hold_back_hooks()
        try:
            vars(group).update(own)
            self._reductions.add(reduction)
            result = stock(*args)
            self._on_reduced()
        finally:
            vars(group).update(users)
            reduction.put_hooks_back()
            if self._sync.device.type == "cuda":
                reduction.done = group._post_reduce_event
        self._reductions.end_outside()
        return result

    def _begin(self, params: list[Any], absent: set[str]) -> Reduction:
        names = [self._names[id(param)] for param in params]
        return Reduction(params=params, names=names, absent=absent, is_sent=True, device=self._sync.device)

    def layout_for(self, numel: int) -> BucketLayout:
        """The layout of rows with `numel` elements, the number that FSDP2 has passed.

        Raises:
            RuntimeError: The trained parameters have a different number of elements.
        """
        params = [p for p in self._param_group.fsdp_params if p.sharded_param.requires_grad]
        names = tuple(self._names[id(p)] for p in params)
        if names not in self._rows:
            self._rows[names] = self._row(names, [tuple(p._orig_size) for p in params])
        layout, expected = self._rows[names]
        if numel != expected:
            raise RuntimeError(
                f"FSDP2 reduces {numel} elements per rank, but the trainable parameters have {expected}: were"
                " parameters frozen or unfrozen in the middle of a step? Do that between steps"
            )
        return layout

    def _row(self, names: tuple[str, ...], shapes: list[tuple[int, ...]]) -> tuple[BucketLayout, int]:
        sharded, ranks = self._sync.sharded, self._ranks
        num_ranks = ranks.world_size if sharded else ranks.topology.num_parts
        entries, at = [], 0
        for name, shape in zip(names, shapes, strict=True):
            if sharded or self._sync.specs[name].numel:
                entries.append((name, at))
            at += dim0_row_numel(shape, num_ranks)
        if sharded:
            return BucketLayout(tuple(entries), row_numel=at, num_marked=len(names)), at
        return BucketLayout(tuple(entries), alone=True, names=names, num_marked=len(names)), at


class BetweenNodes:
    """CUDA: the stream that reduces a module between nodes while the next module is reduced inside its node.

    At most two modules wait between the two phases: if links between nodes are slow, the next module waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._earlier, self._last = torch.cuda.Event(), torch.cuda.Event()

    def make_room(self) -> None:
        """Wait, in the stream that reduces inside the node, until there is room for another module."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._earlier)

    def reduced(self) -> None:
        """Note, in `stream`, that a module is done."""
        self._earlier.record(self.stream)
        self._earlier, self._last = self._last, self._earlier


_DIVIDED_AFTERWARDS = (torch.float32, torch.bfloat16)  # FSDP2 divides other dtypes partly before they are reduced


class CompressedReduceScatter(_ReduceScatter):
    """Reduces ``[W * n]`` to ``[n]``: the sum, divided as FSDP2 would, or still to be divided by FSDP2.

    With two levels it reduces only inside the node, and `reduce_between_nodes`, FSDP2's all-reduce hook, does the rest.

    With far ranks, messages travel while backward continues: FSDP2 gets the tensor that will hold the gradients, and
    the end of the backward pass waits for them, unless they are read earlier.

    Args:
        param_group, names, reductions, on_reduced: See the base class.
        between: The stream for exchanges between nodes, on CUDA with two levels.
    """

    _between_stages: Stages
    _continues_between_nodes = False  # whether `reduce_between_nodes` does the rest
    _divisor = 1.0

    def __init__(
        self,
        param_group: Any,
        names: Mapping[int, str],
        reductions: Reductions,
        on_reduced: Callable[[], None],
        between: BetweenNodes | None,
    ) -> None:
        super().__init__(param_group, names, reductions, on_reduced)
        self._between = between

    def _settings(self) -> dict[str, Any]:
        group = self._param_group
        self._continues_between_nodes = (
            self._overlapped is None and self._ranks.intra_node is not None and not group._all_reduce_hook
        )
        own: dict[str, Any] = {"force_sum_reduction_for_comms": True}
        self._divisor = 1.0
        if self._ranks.world_size > 1 and reduce_dtype(group) in _DIVIDED_AFTERWARDS:
            self._divisor = group.gradient_divide_factor or float(self._ranks.world_size)
            own["gradient_divide_factor"] = 1.0
        if self._continues_between_nodes:
            stream = None if self._between is None else self._between.stream
            own |= {"_all_reduce_hook": self.reduce_between_nodes, "_all_reduce_hook_stream": stream}
        return own

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        layout = self.layout_for(output_tensor.numel())
        if self._param_group._all_reduce_hook is not None and not self._continues_between_nodes:
            output_tensor.zero_()  # the user's hook also sees padding
        if self._overlapped is not None:
            self._reduce_meanwhile(self._overlapped, layout, input_tensor, output_tensor)
        else:
            if self._between is not None:
                self._between.make_room()
            with waiting(self._sync):
                overlaps = self._between is not None
                inside, self._between_stages = self._phases(layout, input_tensor, output_tensor, overlaps=overlaps)
                wait_for_all(inside if self._continues_between_nodes else itertools.chain(inside, self._between_stages))
            if not self._continues_between_nodes:
                self._divide_(output_tensor)

    def _phases(self, layout: BucketLayout, x: Tensor, out: Tensor, *, overlaps: bool = False) -> Phases:
        return reduce_scatter(self._sync, layout, x, out, ranks=self._ranks, overlaps=overlaps, marks=self._marks)

    def _divide_(self, total: Tensor) -> None:
        if self._divisor != 1.0:
            total.div_(self._divisor)

    def reduce_between_nodes(self, reduced: Tensor) -> None:
        """Fill `reduced`, the output of the previous call."""
        if reduced.is_cuda:  # FSDP2 allocated it in a different stream
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        with waiting(self._sync):
            wait_for_all(self._between_stages)
        self._divide_(reduced)
        if self._between is not None:
            self._between.reduced()

    def _reduce_meanwhile(self, overlapped: OverlappedRunner, layout: BucketLayout, x: Tensor, out: Tensor) -> None:
        if self._sync.has_entered(layout):  # the module has run twice in one pass
            overlapped.finish()
        inside, between = self._phases(layout, x, out, overlaps=True)
        wait_for_all(inside)
        overlapped.run(
            between,
            out,
            blocking=self._is_read_at_once
            or is_converted(self._param_group, out)
            or out.dtype not in _DIVIDED_AFTERWARDS,
            on_done=functools.partial(self._divide_, out),
        )


class HybridReduction(_ReduceScatter):
    """HSDP: the mean over the ranks that shard a model, exact or coded (`NodeMeans`), added in float32 in rank order;
    then the mean of this rank's shards over the replicas, in place, in FSDP2's all-reduce hook (`all_reduce`).

    After ``set_requires_all_reduce(False)`` a micro-batch's shards stay on this rank, and FSDP2 gets zeros. The shards
    are added to those of the next micro-batch that is reduced.
    """

    _kept: Tensor | None = None  # shards of micro-batches that were not reduced
    _kept_names: frozenset[str] = frozenset()  # parameters that had gradients in them
    _hook: Callable[[Tensor], None] | None = None  # the user's all-reduce hook
    _factor: float | None = None  # the user's divisor

    def _begin(self, params: list[Any], absent: set[str]) -> Reduction:
        waits = not (self._is_local or self._param_group.all_reduce_grads)
        absent = absent - self._kept_names
        self._kept_names = frozenset(self._names[id(param)] for param in params) - absent if waits else frozenset()
        reduction = super()._begin(params, absent)
        reduction.is_sent = not waits
        return reduction

    @property
    def _is_local(self) -> bool:
        """Whether replicas train separately."""
        return self._sync.rounds is not None or self._ranks.alone

    def _settings(self) -> dict[str, Any]:
        group = self._param_group
        self._hook, self._factor = group._all_reduce_hook, group.gradient_divide_factor
        return {
            "force_sum_reduction_for_comms": True,
            "gradient_divide_factor": 1.0,
            "_all_reduce_hook": self.all_reduce,
            "_all_reduce_hook_stream": None if self._overlapped is None else self._overlapped.stream,
        }

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        inside = self._ranks.intra_node
        assert inside is not None
        layout = self.layout_for(output_tensor.numel())
        wait_for_all(self._sync.node_means[inside].mean_of_rows(layout, input_tensor, output_tensor.view(1, -1)))

    def all_reduce(self, reduced: Tensor) -> None:
        if reduced.is_cuda:  # FSDP2 allocated it in a different stream
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        if self._is_local:
            self._finish(reduced, self._factor)
            return
        if self._kept is not None:
            reduced += self._kept
        self._kept = None
        if not self._param_group.all_reduce_grads:
            self._kept = reduced.clone()
            reduced.zero_()
            return
        assert self._overlapped is not None
        layout = self.layout_for(reduced.numel())
        if self._sync.has_entered(layout):  # the module has run twice in one pass
            self._overlapped.finish()
        self._overlapped.run(
            self._sync.reduce(layout, reduced, reduced, self._marks, ranks=self._ranks),
            reduced,
            blocking=self._is_read_at_once or is_converted(self._param_group, reduced),
            on_done=functools.partial(self._finish, reduced, self._factor),
        )

    def _finish(self, mean: Tensor, factor: float | None) -> None:
        """Turn the `mean` over ranks into the sum divided by `factor`, if there is one; then call the user's hook."""
        if factor is not None:
            inside = self._ranks.intra_node
            assert inside is not None
            num_ranks = inside.world_size if self._is_local else self._ranks.world_size
            if factor != num_ranks:
                mean.mul_(num_ranks / factor)
        if self._hook is not None:
            self._hook(mean)


def _fill(param: Any) -> bool:
    """Give a parameter a gradient of zeros if it has none. Return whether it had one."""
    full = getattr(param, "_unsharded_param", None)
    if full is None or not full.requires_grad:
        return True
    if full.grad is not None or param.unsharded_accumulated_grad is not None:
        return True
    full.grad = torch.zeros_like(full)
    return False


def is_read_at_once(param_group: Any) -> bool:
    """Whether FSDP2 or an optimizer in backward reads the result before the backward pass ends."""
    return any(
        param.sharded_param.grad is not None or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
        for param in param_group.fsdp_params
    )


def is_converted(param_group: Any, reduced: Tensor) -> bool:
    """Whether FSDP2 converts the result to a different dtype before the backward pass ends."""
    return reduced.dtype != (param_group._orig_dtype or reduced.dtype)
