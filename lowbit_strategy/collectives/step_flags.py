"""Flags that are set while a step runs and read when it ends: overflow, and unexpected messages."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm

CHECKED_NBYTES = 8  # the part of a message's header that is the same on all ranks


class StepFlags:
    """Records overflow, unexpected layouts, and weights that were changed without the engine's knowledge.

    On CPU an unexpected layout is an error immediately. On CUDA, checking would synchronize the host, so the first rank
    that sent something unexpected is noted on the device and copied to the host without waiting. `raise_if_broken`
    reads the last copy that has arrived. Only one copy is in flight at a time, since a host that runs steps ahead of
    its device would otherwise never see one finish.

    Attributes:
        overflow: int32 [1], set to 1 when this rank contributes inf or NaN, or owns a non-finite mean.
    """

    def __init__(self, device: torch.device) -> None:
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self._broken = torch.zeros(1, dtype=torch.int32, device=device)  # 1 + the rank that sent a different layout
        self._differs: Tensor | None = None  # words of each rank's headers that were unexpected
        self._changed = torch.zeros(1, dtype=torch.bool, device=device)
        self._on_host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None  # recorded after the copy in flight

    def check_layout(self, received_WB: Tensor, header: Tensor, rank: int) -> None:
        """Check that every rank has sent the header that this rank would have sent.

        An FSDP2 module that runs on only some ranks makes ranks disagree; this can happen in any step.

        Raises:
            RuntimeError: A rank has not (on CPU only).
        """
        if received_WB.is_cuda:
            self.note_layout(received_WB, header)
            return
        differs_W = (received_WB[:, :CHECKED_NBYTES] != header[:CHECKED_NBYTES]).any(1)
        if bool(differs_W.any()):
            raise RuntimeError(_other_layout(int(differs_W.to(torch.int32).argmax()), rank))

    def note_layout(self, received_WB: Tensor, header: Tensor) -> None:
        """`check_layout` without an immediate answer, in only two operations, since a step has many buckets."""
        words = received_WB[:, :CHECKED_NBYTES].view(torch.int64)
        if self._differs is None:
            self._differs = torch.zeros(words.shape, dtype=torch.bool, device=words.device)
        self._differs |= words != header[:CHECKED_NBYTES].view(torch.int64)

    def check_unchanged(self, noted: Tensor, present: Tensor, name: str) -> None:
        """Check that kept weights equal the ones that were sent: two digests, int64 ``[1]``.

        Raises:
            RuntimeError: They are not equal (on CPU only).
        """
        if present.is_cuda:
            self._changed |= noted != present
        elif not torch.equal(noted, present):
            raise RuntimeError(changed_weights(name))

    def note_overflow(self, values: Tensor) -> None:
        """Set `overflow` if `values` are not all finite, without making the host wait."""
        torch.maximum(self.overflow, (~values.isfinite().all()).to(torch.int32).view(1), out=self.overflow)

    def overflowed(self, comm: Comm) -> bool:
        """Whether any rank has noted an overflow since `clear`. Call it on all ranks; it waits for the device."""
        total = self.overflow.clone()
        comm.all_reduce_max(total).wait()
        return bool(total.item())

    def clear(self) -> None:
        self.overflow.zero_()

    def raise_if_broken(self, rank: int, *, waits: bool = False) -> None:
        """Once per step, on CUDA: check the last copy if it has arrived, and only then start another one.

        Args:
            rank: This rank.
            waits: Read the flags on the device, because no step follows.

        Raises:
            RuntimeError: A rank has sent a message with a different layout.
        """
        if waits:
            self._raise(int(self.broken()), rank)
        if waits or not self._broken.is_cuda:
            return
        if self._on_host is None or self._copied is None:
            self._on_host = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()
        elif not self._copied.query():
            return
        else:
            self._raise(int(self._on_host), rank)
        self._on_host.copy_(self.broken(), non_blocking=True)
        self._copied.record()

    def _raise(self, number: int, rank: int) -> None:
        if number:
            raise RuntimeError(changed_weights("a module") if number == _CHANGED else _other_layout(number - 1, rank))

    def broken(self) -> Tensor:
        """int32 ``[1]`` on the flags' device: 1 + the last rank that sent a different layout, or `_CHANGED`, or 0."""
        if self._differs is not None:
            differs_W = self._differs.any(1)
            ranks_W = torch.arange(1, len(differs_W) + 1, dtype=torch.int32, device=differs_W.device)
            torch.maximum(self._broken, (ranks_W * differs_W).amax().view(1), out=self._broken)
        return torch.maximum(self._broken, self._changed.to(torch.int32) * _CHANGED)


def _other_layout(sender: int, rank: int) -> str:
    return (
        f"rank {sender} sent a message with a different layout than rank {rank} expects: the ranks' models or"
        " compressor configurations differ, or a module that FSDP2 shards by itself ran on some ranks only (an expert?)"
    )


_CHANGED = 2**31 - 1  # in place of a rank


def changed_weights(name: str) -> str:
    """The message about changed weights, which says what to do."""
    return (
        f"parameters of {name} were changed after its weights had been sent for a forward pass, and before any backward"
        " pass: the other ranks would continue with the old ones. Change weights after backward, or call"
        " weights_changed() on all ranks afterwards (or pass weights=Exact())"
    )
