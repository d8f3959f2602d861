"""DDP: a communication hook that reduces buckets through a `GradientSync`."""

# No postponed annotations here: DDP compares a hook's annotations with types.

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.bucket_schedule import TURN_AFTER
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.two_levels import TwoLevelBuckets
from lowbit_strategy.hooks.runners import BucketWorker, bucket_runner
from lowbit_strategy.model.parameters import bring_back, named_parameters

hooked: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()  # our hooks


def renew_reducer(model: DistributedDataParallel) -> None:
    """Give DDP a new reducer, without a communication hook.

    PyTorch cannot remove a hook. This makes the reducer again, as unpickling a model does. Call it between steps.
    """
    model._remove_autograd_hooks()
    bring_back(model.module)
    parameters, is_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, is_sparse, names, model.static_graph)
    model._comm_hooks = []
    hooked.pop(model, None)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model.reducer._set_static_graph()
        logger: Any = model.logger
        logger._set_static_graph()


class DDPHook:
    """Reduces DDP's buckets in place.

    Before DDP knows the order of gradients, all of them are in one bucket. It is reduced in pieces of the size of later
    buckets, so that messages need no more memory in the first step than in others.

    On CPU a worker thread reduces buckets while backward continues; on CUDA they are reduced on a side stream. DDP may
    rebuild its buckets at any time, so layouts are found by a bucket's content, and state by parameter name.

    Args:
        model: The wrapped model; the hook is registered with it.
        sync: The engine. On CPU its process group must not be the one that DDP uses.

    Attributes:
        cap_nbytes: The size of buckets.

    Raises:
        RuntimeError: The model already has a hook, or compiled autograd would call the hook with different arguments.
    """

    def __init__(self, model: DistributedDataParallel, sync: GradientSync) -> None:
        refuse_python_reducer()
        if (earlier := hooked.get(model)) is not None and earlier.closed:
            renew_reducer(model)
        self.closed: bool = False
        self.sync = sync
        self._levels = None if sync.ranks.intra_node is None else TwoLevelBuckets(sync)
        self.cap_nbytes: int = model.bucket_bytes_cap
        self._cuts: dict[tuple[object, ...], tuple[list[BucketLayout], list[int]]] = {}
        self._names = {id(p): name for name, p in named_parameters(model.module)}
        turn_after = None if self._levels is None or sync.ranks.peers.is_far else TURN_AFTER
        self._runner = bucket_runner(sync.device, turn_after)
        model.register_comm_hook(self, DDPHook.reduce)
        model._comm_hooks.clear()  # DDP registers these on copies of the model, which must not get this hook
        hooked[model] = self

    def cut(self, bucket: dist.GradBucket) -> tuple[list[BucketLayout], list[int]]:
        """The pieces that are reduced separately, and the start of each piece but the first. Like DDP's buckets, a
        piece is full once it has reached their size.
        """
        buffer = bucket.buffer()
        base, itemsize = buffer.data_ptr(), buffer.element_size()
        found: list[list[tuple[str, int]]] = [[]]
        ends = [0]  # ends of the pieces, in elements
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            at = (grad.data_ptr() - base) // itemsize
            if not grad.numel():
                continue
            if (at - ends[-1]) * itemsize >= self.cap_nbytes:
                found.append([])
                ends.append(at)
            found[-1].append((self._names[id(param)], at - ends[-1]))
        last = [False] * (len(found) - 1) + [bucket.is_last()]
        return [BucketLayout(tuple(entries), last=it) for entries, it in zip(found, last, strict=True)], ends[1:]

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The hook that DDP calls. The future must raise errors, since DDP accepts any value as a result."""
        if self.closed:
            raise RuntimeError("the session that compressed this model's gradients was closed: attach_ddp starts over")
        if bucket.index() == 0:
            self.sync.gradients_arrive()
        buffer, last = bucket.buffer(), bucket.is_last()
        key = (last, buffer.dtype, *map(id, bucket.parameters()))
        if key not in self._cuts:
            self._cuts[key] = self.cut(bucket)
        layouts, starts = self._cuts[key]
        stages = []
        for layout, x in zip(layouts, buffer.tensor_split(starts), strict=True):
            stages.append(self.sync.reduce(layout, x, x) if self._levels is None else self._levels.reduce(layout, x))
        future = self._runner.submit(*stages, result=buffer, last=last)
        if last and (done := self.sync.listeners.wait()) is not None:  # backward has nothing left to compute
            future.add_done_callback(lambda _: done())
        return future.then(torch.futures.Future.wait) if isinstance(self._runner, BucketWorker) else future

    def rewrapped(self, model: DistributedDataParallel) -> "DDPHook":
        """The framework has wrapped the module again, after `close`. Return the hook for it."""
        return DDPHook(model, self.sync)

    def close(self) -> bool:
        """Stop the worker. Return True once it has stopped."""
        self.closed = True
        return self._runner.close()


def refuse_python_reducer() -> None:
    """Raise a RuntimeError if ``optimize_ddp="python_reducer"`` is set, which bypasses communication hooks."""
    import torch._dynamo

    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" calls communication hooks with different arguments:'
            " set it to True (the default) or False"
        )
