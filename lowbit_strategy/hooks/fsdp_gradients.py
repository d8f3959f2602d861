"""What FSDP2 calls with the gradients of one of its modules, and what they are handed to the engine as.

Under HSDP, sharded inside a node and replicated between nodes, FSDP2 shards over a mesh of one dim, the ranks that
have one model together. After each module's reduce-scatter, which is exact and stays inside the node, it calls an
all-reduce hook with the rank's own shard of the gradients: the engine replaces it by its mean over the replicas. On CPU
a worker thread does that while backward goes on, and the end of the backward pass waits for it; on CUDA it runs in a
stream of its own, which FSDP2 waits for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.collectives.ordered import sum_rows
from lowbit_strategy.engine.bucket import BucketLayout, Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.two_levels import scatter
from lowbit_strategy.hooks.ddp import BucketWorker
from lowbit_strategy.telemetry.step_times import StepClock, clock_of


class OverlappedReducer:
    """Reduces the modules' shards while backward goes on, in the same order on all ranks.

    Args:
        device: Device of gradients.
        clock: Is told when training waits for them.
    """

    def __init__(self, device: torch.device, clock: StepClock) -> None:
        self._clock = clock
        on_cpu = device.type == "cpu"
        self._worker = BucketWorker() if on_cpu else None
        self.stream = None if on_cpu else torch.cuda.Stream(device, priority=-1)
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._on_done: list[Callable[[], None]] = []
        self._waits = False  # at the end of the current backward pass

    def run(
        self, stages: Stages, result: Tensor, *, blocking: bool, on_done: Callable[[], None] = lambda: None
    ) -> None:
        """Reduce into `result`, then call `on_done`. `blocking`: return when it is done."""
        if self._worker is None:
            wait_for_all(stages)
            on_done()
            return
        self._futures.append(self._worker.submit(stages, result=result, last=False))
        self._on_done.append(on_done)
        if blocking:
            self.finish()
        elif not self._waits:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._waits = False
        self.finish()

    def finish(self) -> None:
        """Wait until nothing is in flight; on all ranks at the same point."""
        if not self._futures:
            return
        assert self._worker is not None
        self._worker.finish()
        futures, self._futures = self._futures, []
        following, self._on_done = self._on_done, []
        with self._clock.waiting():
            for future in futures:
                future.wait()
        for on_done in following:
            on_done()

    def close(self) -> bool:
        """True once the worker has stopped."""
        return self._worker is None or self._worker.close()


class _ReduceScatter(DefaultAllocMixin, torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter):
    """The custom communication of one FSDP2 parameter group.

    For each set of parameters that are trained together it has a layout: one rank's part of the gradients has shards of
    the parameters, one after the other.

    Args:
        param_group: The module's.
        names: Of its parameters, by the identity of FSDP2's own record, which stays when another tensor is loaded.
        sync: The engine. Where it reduces all ranks' rows, all are in the bucket; under HSDP only the rank's own is,
            and parameters that this rank has no part of are left out.
        side: Where gradients are reduced meanwhile; None: FSDP2 waits for each module's.

    Attributes:
        on_reduced: Called on all ranks when the group's gradients have been reduced.
    """

    def __init__(
        self, param_group: Any, names: Mapping[int, str], sync: GradientSync, side: OverlappedReducer | None
    ) -> None:
        self._param_group, self._names, self._sync, self._side = param_group, names, sync, side
        self._rows: dict[tuple[str, ...], tuple[BucketLayout, int]] = {}  # with the number of elements of a row
        self._clock = clock_of(sync)
        self.on_reduced: Callable[[], None] = lambda: None

    def layout_for(self, numel: int) -> BucketLayout:
        """The layout of rows with `numel` elements, which is how many FSDP2 has come with.

        Raises:
            RuntimeError: The parameters that are trained have another number.
        """
        params = [p for p in self._param_group.fsdp_params if p.sharded_param.requires_grad]
        names = tuple(self._names[id(p)] for p in params)
        if names not in self._rows:
            self._rows[names] = self._row(names, [tuple(p._orig_size) for p in params])
        layout, expected = self._rows[names]
        if numel != expected:
            raise RuntimeError(
                f"FSDP2 reduces {numel} elements per rank where the trainable parameters have {expected}: were"
                " parameters frozen or unfrozen in the middle of a step? Do that between steps"
            )
        return layout

    def _row(self, names: tuple[str, ...], shapes: list[tuple[int, ...]]) -> tuple[BucketLayout, int]:
        scatter, ranks = self._sync.scatter, self._sync.ranks
        num_ranks = ranks.world_size if scatter else ranks.topology.num_parts
        entries, at = [], 0
        for name, shape in zip(names, shapes, strict=True):
            if scatter or self._sync.specs[name].numel:
                entries.append((name, at))
            at += dim0_row_numel(shape, num_ranks)
        if scatter:
            return BucketLayout(tuple(entries), row_numel=at), at
        return BucketLayout(tuple(entries), alone=True, key=names), at


class BetweenNodes:
    """CUDA: the stream in which a module is reduced between the nodes, while the next one is inside its node.

    What a node has reduced is kept of two modules at most: where links between nodes are slow, the next one waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._earlier, self._last = torch.cuda.Event(), torch.cuda.Event()

    def make_room(self) -> None:
        """In the stream that reduces inside the node, before it does."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._earlier)

    def reduced(self) -> None:
        """In `stream`: a module is done."""
        self._earlier.record(self.stream)
        self._earlier, self._last = self._last, self._earlier


class CompressedReduceScatter(_ReduceScatter):
    """Input ``[W * n]``, output ``[n]``, always a sum.

    With two levels it ends inside the node, and `between_nodes`, as FSDP2's all-reduce hook, does the rest.

    Where ranks are far apart messages between them travel while backward goes on: FSDP2 is given what will be the
    gradients, and the end of the backward pass waits for them, unless they are read before.

    Args:
        param_group, names, sync, side: See `_ReduceScatter`.
        between: On CUDA where there are two levels.

    Attributes:
        goes_on: Whether `between_nodes` must be called.
    """

    def __init__(
        self,
        param_group: Any,
        names: Mapping[int, str],
        sync: GradientSync,
        side: OverlappedReducer | None,
        between: BetweenNodes | None = None,
    ) -> None:
        super().__init__(param_group, names, sync, side)
        self.goes_on = side is None and sync.ranks.intra_node is not None and param_group._all_reduce_hook is None
        self._between = between
        self._rest: Stages = iter(())

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(
                f"compressed reduce-scatter sums, FSDP2 asked for {op}: was the gradient division changed?"
            )
        layout, sync = self.layout_for(output_tensor.numel()), self._sync
        if self._side is not None:
            self._reduce_meanwhile(self._side, layout, input_tensor, output_tensor)
        else:
            if self._between is not None:
                self._between.make_room()
            with self._clock.waiting():
                inside, self._rest = scatter(sync, layout, input_tensor, output_tensor, aside=self._between is not None)
                wait_for_all(inside if self.goes_on else itertools.chain(inside, self._rest))
        self.on_reduced()

    def between_nodes(self, reduced: Tensor) -> None:
        """`reduced` is the output of the call before, which is still to be filled."""
        if reduced.is_cuda:  # FSDP2 has allocated it in another stream
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        with self._clock.waiting():
            wait_for_all(self._rest)
        if self._between is not None:
            self._between.reduced()

    def _reduce_meanwhile(self, side: OverlappedReducer, layout: BucketLayout, x: Tensor, out: Tensor) -> None:
        blocking = is_read_at_once(self._param_group, out) or out.dtype not in _DIVIDED_AFTERWARDS
        if blocking or self._sync.has_entered(layout):  # the module has run twice in one pass
            side.finish()
        if blocking:
            wait_for_all(itertools.chain(*scatter(self._sync, layout, x, out)))
            return
        total = torch.empty_like(out)  # FSDP2 divides `out` as soon as this returns
        divisor = self._param_group.gradient_divide_factor or float(self._sync.ranks.world_size)

        def mean() -> None:
            out.copy_(total.div_(divisor))

        inside, between = scatter(self._sync, layout, x, total, aside=True)
        wait_for_all(inside)
        side.run(between, total, blocking=False, on_done=mean)


_DIVIDED_AFTERWARDS = (torch.float32, torch.bfloat16)  # FSDP2 divides others in part before they are reduced


class HybridReduction(_ReduceScatter):
    """HSDP: a mean over the ranks that shard a model, exact or of codes (`NodeCodes`), added in float32 and in rank
    order; then the mean of the own shards over the replicas, in place, in FSDP2's all-reduce hook (`all_reduce`).

    FSDP2 must divide by one: `torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor`.
    After ``set_requires_all_reduce(False)`` a micro-batch's shards stay on this rank, and FSDP2 is given zeros. They
    are added to those of the next one that is reduced. Without a `side` there is one replica.
    """

    _kept: Tensor | None = None  # of micro-batches that were not reduced

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        inside, codes = self._sync.ranks.intra_node, self._sync.node_codes
        assert inside is not None
        mean_GN = output_tensor.view(1, -1)
        if codes is None:
            x_WGN = input_tensor.view(inside.world_size, 1, -1)
            wait_for_all(sum_rows(x_WGN, mean_GN, inside, alpha=1.0 / inside.world_size))
        else:
            layout = self.layout_for(output_tensor.numel())
            assert isinstance(layout.key, tuple)  # the names of all parameters
            wait_for_all(codes.mean_of_rows(layout, layout.key, input_tensor, mean_GN))
        self.on_reduced()

    def all_reduce(self, reduced: Tensor) -> None:
        if reduced.is_cuda:  # FSDP2 has allocated it in another stream
            reduced.record_stream(torch.cuda.current_stream(reduced.device))
        if self._sync.outer is not None:  # replicas train by themselves
            return
        if self._kept is not None:
            reduced += self._kept
        self._kept = None
        if not self._param_group.all_reduce_grads:
            self._kept = reduced.clone()
            reduced.zero_()
            return
        assert self._side is not None
        layout = self.layout_for(reduced.numel())
        if self._sync.has_entered(layout):  # the module has run twice in one pass
            self._side.finish()
        blocking = is_read_at_once(self._param_group, reduced)
        self._side.run(self._sync.reduce(layout, reduced, reduced), reduced, blocking=blocking)


def is_read_at_once(param_group: Any, reduced: Tensor) -> bool:
    """Whether FSDP2, or an optimizer in backward, reads the result before the backward pass is over."""
    return reduced.dtype != (param_group._orig_dtype or reduced.dtype) or any(
        param.sharded_param.grad is not None or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
        for param in param_group.fsdp_params
    )
