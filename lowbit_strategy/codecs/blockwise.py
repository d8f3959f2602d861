"""Base class of codecs that are written in plain PyTorch, block by block."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.segments import Segments

Noise = Callable[[int], Tensor]  # stream -> float32 [K, B], uniform in [-0.5, 0.5)


class BlockwiseCodec(BucketCodec):
    """Codes every block of ``block_size`` elements as ``block_nbytes`` bytes, a whole bucket in one pass.

    A subclass codes and decodes [K, B] blocks. Blocks with inf or NaN are passed as zeros with ``finite_K`` False, and
    must decode to NaN.
    """

    @property
    @abstractmethod
    def block_nbytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        """Encode float32 blocks as uint8 [K, block_nbytes]. `valid_KB` is False on padding, whose values are zero."""

    @abstractmethod
    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        """float32 [K, B]."""

    @staticmethod
    def trailer(payload_KC: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
        """Copy the last bytes of every block as numbers, [K, ...]; a view would need aligned offsets and strides."""
        return payload_KC[:, -nbytes:].clone(memory_format=torch.contiguous_format).view(dtype)

    def wire_nbytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.block_nbytes

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.block_size)
        if not packed.numel:
            return
        h_KB = packed.collect(x).view(-1, self.block_size)
        finite_K = h_KB.isfinite().all(-1)
        h_KB = torch.where(finite_K[:, None], h_KB, 0.0)
        payload_KC = self.encode_blocks(
            h_KB, packed.valid(x.device), finite_K, lambda stream: packed.noise(step.seed, stream, x.device)
        )
        packed.store_wire_(wire, payload_KC)
        flag |= (~finite_K.all()).to(flag.dtype)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        total = functools.reduce(Tensor.add_, self.decode_rows(wire_WB, segments))
        pack_segments(segments, self.block_size).spread_(total.mul_(alpha), out)

    def decode_rows(self, wire_WB: Tensor, segments: Segments) -> Iterator[Tensor]:
        """Decode and pack what each source has sent, in rank order."""
        packed = pack_segments(segments, self.block_size)
        for wire in wire_WB:
            yield self.decode_blocks(packed.collect_wire(wire, self.block_nbytes)).reshape(-1)
