"""Memory for messages, lent to one bucket at a time, so that it is as large as what is under way and no larger."""

from __future__ import annotations

import torch
from torch import Tensor


class WireBuffers:
    """Byte buffers that messages are built and received in.

    A bucket borrows what it needs while its bytes travel and gives it back; the next bucket borrows the same memory.
    All borrowing happens on one thread (and, on CUDA, on one stream), so a returned buffer is free to be written.

    Args:
        device: Where messages lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held now, free and lent."""
        return sum(buffer.nbytes for buffer in (*self._free, *self._lent.values()))

    def borrow(self, rows: int, nbytes: int) -> Tensor:
        """uint8 ``[rows, nbytes]``. What it holds is left from an earlier message, or zeros: never foreign memory."""
        needed = rows * nbytes
        fitting = [buffer for buffer in self._free if buffer.numel() >= needed]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
        else:
            buffer = torch.zeros(needed, dtype=torch.uint8, device=self._device)
            if self._free:  # one that was too small makes room
                self._remove(max(self._free, key=Tensor.numel))
        self._remove(buffer)
        self._lent[buffer.untyped_storage()._cdata] = buffer
        return buffer[:needed].view(rows, nbytes)

    def give_back(self, *wires: Tensor) -> None:
        """Return what `borrow` has lent."""
        for wire in wires:
            self._free.append(self._lent.pop(wire.untyped_storage()._cdata))

    def reclaim(self) -> None:
        """Take back everything that is lent, when nothing is under way: a bucket that failed has returned nothing."""
        self._free += self._lent.values()
        self._lent = {}

    def _remove(self, buffer: Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]
