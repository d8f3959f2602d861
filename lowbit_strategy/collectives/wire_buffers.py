"""Memory for messages, which buckets borrow one after the other."""

from __future__ import annotations

import torch
from torch import Tensor


class WireBuffers:
    """Byte buffers in which messages are built and received.

    A bucket borrows what it needs while its bytes travel, then returns it, and the next bucket borrows the same memory.
    All borrowing happens on one thread (and, on CUDA, on one stream), so a returned buffer is free to be written.

    With several buckets in flight, a short message must not borrow a long buffer. Otherwise the next long message would
    allocate another, until every buffer had the longest size.

    Args:
        device: Where messages lie.
        several: Whether several buckets are in flight at a time; a buffer then serves only messages of at least half
            its size.
    """

    def __init__(self, device: torch.device, *, several: bool = False) -> None:
        self._device = device
        self._several = several
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self._used: set[int] = set()  # buffers used in the current backward pass

    @property
    def nbytes(self) -> int:
        """Bytes held now, both free and lent."""
        return sum(buffer.nbytes for buffer in (*self._free, *self._lent.values()))

    def borrow(self, rows: int, nbytes: int) -> Tensor:
        """Borrow uint8 ``[rows, nbytes]``, which holds an earlier message or zeros, never uninitialized memory."""
        needed = rows * nbytes
        longest = 2 * needed if self._several else float("inf")
        best, at = longest, None
        for index, free in enumerate(self._free):
            if needed <= free.numel() <= longest and (at is None or free.numel() < best):
                best, at = free.numel(), index
        if at is not None:
            buffer = self._free.pop(at)
        else:
            self._make_room(needed)
            buffer = torch.zeros(needed, dtype=torch.uint8, device=self._device)
        self._lent[buffer.untyped_storage()._cdata] = buffer
        self._used.add(id(buffer))
        return buffer[:needed].view(rows, nbytes)

    def _make_room(self, needed: int) -> None:
        """Free a buffer that is a little too small before allocating a larger one. With several buckets in flight and
        no such buffer, free as many bytes from buffers that this pass has not used, since bucket sizes have changed.
        """
        shortest = needed / 2 if self._several else 0
        small = [buffer for buffer in self._free if shortest <= buffer.numel() < needed]
        if small or not self._several:
            for buffer in sorted(small, key=Tensor.numel)[-1:]:
                self._remove(buffer)
            return
        for buffer in [each for each in self._free if id(each) not in self._used]:
            if needed > 0:
                self._remove(buffer)
                needed -= buffer.numel()

    def give_back(self, *wires: Tensor) -> None:
        """Return a buffer from `borrow`."""
        for wire in wires:
            self._free.append(self._lent.pop(wire.untyped_storage()._cdata))

    def reclaim(self) -> None:
        """When a backward pass begins and nothing is in flight, take back the buffers of a failed bucket, and free
        those that the previous pass did not use, since bucket sizes have changed.
        """
        self._free += self._lent.values()
        if self._used and not self._used.issuperset(map(id, self._free)):
            self._free = [buffer for buffer in self._free if id(buffer) in self._used]
        self._lent, self._used = {}, set()

    def _remove(self, buffer: Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]
