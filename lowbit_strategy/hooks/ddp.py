"""DDP: a communication hook that reduces buckets through a `GradientSync`."""

# No postponed annotations here: DDP compares the annotations of a hook with the types themselves.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.two_levels import TwoLevelBuckets
from lowbit_strategy.hooks.worker import BucketWorker, SideStream
from lowbit_strategy.model.parameters import canonical_name


class DDPHook:
    """Reduces DDP's buckets in place.

    On CPU one worker thread reduces them while backward goes on; on CUDA they are reduced on a side stream. DDP may
    rebuild its buckets at any time: layouts are looked up by what a bucket holds, state by parameter name.

    Args:
        model: The wrapped model; the hook is registered with it.
        sync: Reduces; its communicator's group must not be the one DDP uses (on CPU).

    Raises:
        RuntimeError: The model has a hook already, or compiled autograd would call it with other arguments.
    """

    def __init__(self, model: DistributedDataParallel, sync: GradientSync) -> None:
        refuse_python_reducer()
        self.sync = sync
        self._levels = None if sync.ranks.intra_node is None else TwoLevelBuckets(sync)
        self._names = {id(p): canonical_name(name) for name, p in model.module.named_parameters()}
        self._side: BucketWorker | SideStream = BucketWorker() if sync.device.type == "cpu" else SideStream(sync.device)
        model.register_comm_hook(self, DDPHook.reduce)

    def layout(self, bucket: dist.GradBucket) -> BucketLayout:
        buffer = bucket.buffer()
        base, itemsize = buffer.data_ptr(), buffer.element_size()
        entries = tuple(
            Entry(self._names[id(param)], (grad.data_ptr() - base) // itemsize)
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if grad.numel()
        )
        return BucketLayout(entries, last=bucket.is_last())

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        layout = self.layout(bucket)
        if self._levels is None:
            stages = self.sync.reduce(layout, buffer, buffer)
        else:
            stages = self._levels.reduce(layout, buffer)
        return self._side.submit(stages, buffer, last=bucket.is_last())

    def close(self) -> bool:
        """Whether nothing of it runs any more."""
        return not isinstance(self._side, BucketWorker) or self._side.close()


def refuse_python_reducer() -> None:
    """Raises:
    RuntimeError: ``optimize_ddp="python_reducer"`` is set: compiled autograd bypasses communication hooks.
    """
    import torch._dynamo

    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise RuntimeError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" calls communication hooks with other arguments:'
            " set it to True (the default) or False"
        )
