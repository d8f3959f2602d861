"""Codecs in plain PyTorch whose blocks are coded one by one: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.segments import Segment, Segments

Noise = Callable[[int], Tensor]  # stream -> float32 [K, B], uniform in [-0.5, 0.5)


class BlockwiseCodec(Codec):
    """Every block of ``block_size`` elements becomes ``block_nbytes`` bytes; one pass over a whole bucket.

    A subclass codes and decodes [K, B] blocks. Blocks with inf or NaN arrive as zeros with ``finite_K`` False and must
    decode to NaN.
    """

    @property
    @abstractmethod
    def block_nbytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        """uint8 [K, block_nbytes] of float32 blocks; `valid_KB` is False on padding, whose values are zero."""

    @abstractmethod
    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        """float32 [K, B]."""

    def wire_nbytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.block_nbytes

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        wire = torch.zeros(self.wire_nbytes(x_N.numel()), dtype=torch.uint8, device=x_N.device)
        flag = torch.zeros(1, dtype=torch.int32, device=x_N.device)
        self.encode_segments_(x_N, wire, _whole(x_N.numel()), seed=seed, flag=flag)
        return wire

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel, dtype=torch.float32, device=wire_WB.device)
        self.decode_sum_segments_(wire_WB, out, _whole(numel), alpha=1.0)
        return out

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        if not segments.rows:
            return
        packed = pack_segments(segments, self.block_size)
        h_KB = packed.collect(x).view(-1, self.block_size)
        finite_K = h_KB.isfinite().all(-1)
        h_KB = torch.where(finite_K[:, None], h_KB, 0.0)
        payload_KC = self.encode_blocks(
            h_KB, packed.valid(x.device), finite_K, lambda stream: packed.noise(seed, stream, x.device)
        )
        packed.store_wire_(wire, payload_KC)
        flag |= (~finite_K.all()).to(flag.dtype)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        if not segments.rows:
            return
        total: Tensor | None = None
        for values in self.decode_rows(wire_WB, segments):
            total = values if total is None else total.add_(values)
        assert total is not None
        pack_segments(segments, self.block_size).spread_(total.mul_(alpha), out)

    def decode_rows(self, wire_WB: Tensor, segments: Segments) -> Iterator[Tensor]:
        """What each source has sent, decoded and packed, in rank order."""
        packed = pack_segments(segments, self.block_size)
        for wire in wire_WB:
            yield self.decode_blocks(packed.collect_wire(wire, self.block_nbytes)).reshape(-1)


def trailer(payload_KC: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
    """The last bytes of every block as numbers, [K, ...]; a copy, since views need aligned offsets and strides."""
    return payload_KC[:, -nbytes:].clone(memory_format=torch.contiguous_format).view(dtype)


def _whole(numel: int) -> Segments:
    return Segments([Segment(0, numel, 0, 0)] if numel else [])
