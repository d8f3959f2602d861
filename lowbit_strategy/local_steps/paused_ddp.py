"""Keeps DDP from communicating while steps are local."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel


class PausedDDP:
    """A model's DDP wrapper, which must not synchronize gradients and buffers while steps are local, but may have to
    later.

    The wrapper is only weakly referenced; when it is gone, everything is closed. Under FSDP2 there is none.
    """

    def __init__(self) -> None:
        self._found: Callable[[], DistributedDataParallel | None] = lambda: None
        self._is_paused = False

    def wraps(self, model: DistributedDataParallel) -> None:
        """Note the wrapper. The adapter replaces it if the trained parameters change before steps are local."""
        self._found = weakref.ref(model)
        if self._is_paused:
            self.pause()

    def pause(self) -> None:
        """Pause DDP's synchronization."""
        self._is_paused = True
        if (ddp := self._found()) is not None:
            self._broadcasts_buffers = ddp.broadcast_buffers
            self._has_delayed = getattr(ddp, "_static_graph_delay_allreduce_enqueued", False)  # if the graph is static
        self.keep_paused()

    def keep_paused(self) -> None:
        """Pause it again if it was paused, since Lightning turns it on in each manual step."""
        if self._is_paused and (ddp := self._found()) is not None:
            ddp.require_backward_grad_sync = False
            ddp.require_forward_param_sync = False
            ddp.broadcast_buffers = False
            ddp._static_graph_delay_allreduce_enqueued = True  # or the next backward pass would reduce at its end

    def go_on(self) -> None:
        """Resume DDP's synchronization."""
        self._is_paused = False
        if (ddp := self._found()) is not None:
            ddp.require_backward_grad_sync = True
            ddp.require_forward_param_sync = True
            ddp.broadcast_buffers = self._broadcasts_buffers
            ddp._static_graph_delay_allreduce_enqueued = self._has_delayed
