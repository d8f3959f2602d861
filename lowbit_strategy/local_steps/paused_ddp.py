"""Keeps DDP from communicating while steps are local."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel


class PausedDDP:
    """A model's DDP wrapper, which must not touch gradients and buffers while steps are local, and may have to again.

    It is only weakly referenced; when it is gone, everything is closed. Under FSDP2 there is none.
    """

    def __init__(self) -> None:
        self._found: Callable[[], DistributedDataParallel | None] = lambda: None
        self._is_paused = False

    def wraps(self, model: DistributedDataParallel) -> None:
        """Note the wrapper. The adapter replaces it if other parameters are trained before steps are local."""
        self._found = weakref.ref(model)
        if self._is_paused:
            self.pause()

    def pause(self) -> None:
        """Stop DDP's part, which it may get back."""
        self._is_paused = True
        if (ddp := self._found()) is not None:
            self._broadcasts_buffers = ddp.broadcast_buffers
            self._has_delayed = getattr(ddp, "_static_graph_delay_allreduce_enqueued", False)  # only of a static graph
        self.keep_paused()

    def keep_paused(self) -> None:
        """Stop it again if it is paused, since Lightning turns it on in each manual step."""
        if self._is_paused and (ddp := self._found()) is not None:
            ddp.require_backward_grad_sync = False
            ddp.require_forward_param_sync = False
            ddp.broadcast_buffers = False
            ddp._static_graph_delay_allreduce_enqueued = True  # or it would reduce at the end of the next backward pass

    def go_on(self) -> None:
        """Give DDP its part back."""
        self._is_paused = False
        if (ddp := self._found()) is not None:
            ddp.require_backward_grad_sync = True
            ddp.require_forward_param_sync = True
            ddp.broadcast_buffers = self._broadcasts_buffers
            ddp._static_graph_delay_allreduce_enqueued = self._has_delayed
