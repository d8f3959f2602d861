"""HSDP: sharded inside a node, replicated between nodes; the sum over replicas goes through a `GradientSync`.

FSDP2 shards over a mesh of one dim, the ranks that have one model together. After each module's reduce-scatter, which
is exact and stays inside the node, it calls an all-reduce hook with the rank's own shard of the gradients: the engine
replaces it by its mean over the replicas. On CPU a worker thread does that while backward goes on, and the end of the
backward pass waits for it; on CUDA it runs in a stream of its own, which FSDP2 waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import dim0_cut
from lowbit_strategy.collectives.ordered import sum_rows
from lowbit_strategy.engine.bucket import BucketLayout, Entry, Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.worker import BucketWorker


class ExactReduceScatter(torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter):
    """The mean over the ranks that shard a model, added in float32 and in rank order.

    FSDP2 must divide by one: `torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor`.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        x_WN = input_tensor.view(self._comm.world_size, -1)
        for pending in sum_rows(x_WN, output_tensor, self._comm, alpha=1.0 / self._comm.world_size):
            pending.wait()


class BackwardSide:
    """Where the modules' shards are reduced while backward goes on, in one order on all ranks.

    Args:
        device: Of gradients.
    """

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._worker = BucketWorker() if on_cpu else None
        self.stream = None if on_cpu else torch.cuda.Stream(device, priority=-1)
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._waits = False  # at the end of the backward pass under way

    def run(self, stages: Stages, result: Tensor, *, at_once: bool) -> None:
        """Reduce into `result`. `at_once`: it is read as soon as this returns."""
        if self._worker is None:
            result.record_stream(torch.cuda.current_stream(result.device))  # FSDP2 has allocated it in another one
            for pending in stages:
                if pending is not None:
                    pending.wait()
            return
        self._futures.append(self._worker.submit(stages, result, last=False))
        if at_once:
            self.finish()
        elif not self._waits:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._waits = False
        self.finish()

    def finish(self) -> None:
        """Wait until nothing is under way; on all ranks at the same point."""
        if not self._futures:
            return
        assert self._worker is not None
        self._worker.finish()
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._worker is None or self._worker.close()


class ReplicaAllReduce:
    """The all-reduce hook of one FSDP2 parameter group: the mean of the own shards over the replicas, in place."""

    def __init__(self, sync: GradientSync, param_group: Any, names: dict[int, str], side: BackwardSide) -> None:
        assert sync.share is not None
        self._sync = sync
        self._param_group = param_group
        self._names = names
        self._side = side
        self._count = sync.share.count
        self._layouts: dict[tuple[str, ...], tuple[BucketLayout, int]] = {}

    def __call__(self, reduced: Tensor) -> None:
        if self._sync.outer is not None:  # replicas train by themselves
            return
        layout, numel = self.layout()
        if numel != reduced.numel():
            raise RuntimeError(
                f"FSDP2 reduces {reduced.numel()} elements per rank where the trainable parameters have {numel}: some"
                " got no gradient. torch >= 2.13 reduces zeros for them; with an older one every parameter of a sharded"
                " module must be used in every step"
            )
        if self._sync.has_entered(layout):  # the module has run twice in one pass
            self._side.finish()
        self._side.run(self._sync.reduce(layout, reduced, reduced), reduced, at_once=self._is_read_at_once(reduced))

    def _is_read_at_once(self, reduced: Tensor) -> bool:
        """Whether FSDP2, or an optimizer in backward, reads the result before the backward pass is over."""
        group = self._param_group
        return reduced.dtype != (group._orig_dtype or reduced.dtype) or any(
            param.sharded_param.grad is not None or getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
            for param in group.fsdp_params
        )

    def layout(self) -> tuple[BucketLayout, int]:
        """What the module's parameters that are trained now will be handed in as, and how many elements that is."""
        params = [p for p in self._param_group.fsdp_params if p.sharded_param.requires_grad]
        names = tuple(self._names[id(p.sharded_param)] for p in params)
        if names not in self._layouts:
            entries, at = [], 0
            for name, param in zip(names, params, strict=True):
                if self._sync.specs[name].numel:
                    entries.append(Entry(name, at))
                at += dim0_cut(tuple(param._orig_size), self._count).row_numel
            self._layouts[names] = BucketLayout(tuple(entries), alone=True, key=names), at
        return self._layouts[names]
