"""A bucket's pieces laid end to end in whole blocks, so that plain PyTorch works on all of them at once."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import dither_at, stream_key
from lowbit_strategy.kernels.segments import Segments


class Packed:
    """The pieces of a `Segments` table one after the other, each padded with zeros to whole blocks.

    Attributes:
        segments: The same pieces with ``x_offset`` in the packed buffer.
        numel: Elements of the packed buffer, padding included.
    """

    def __init__(self, source: Segments, block_size: int) -> None:
        self.source = source
        self.block_size = block_size
        self.lengths = [-(-row.numel // block_size) * block_size for row in source.rows]
        rows, self.numel = [], 0
        for row, length in zip(source.rows, self.lengths, strict=True):
            rows.append(row._replace(x_offset=self.numel))
            self.numel += length
        self.segments = Segments(rows)
        self.padded_segments = Segments(
            [row._replace(numel=length) for row, length in zip(rows, self.lengths, strict=True)]
        )
        self._index: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def num_blocks(self) -> int:
        return self.numel // self.block_size

    def collect(self, x: Tensor) -> Tensor:
        """float32 [numel]: the pieces of `x`, zeros between."""
        packed = torch.zeros(self.numel, dtype=torch.float32, device=x.device)
        _copy(self._pieces(packed, self.segments), self._pieces(x, self.source))
        return packed

    def spread_(self, packed: Tensor, x: Tensor) -> None:
        """Write the pieces back to their places in `x`."""
        _copy(self._pieces(x, self.source), self._pieces(packed, self.segments))

    def collect_state(self, arena: Tensor, unit: int = 1) -> Tensor:
        """A copy of the pieces' part of an arena, whole blocks; `unit` elements an entry."""
        parts = self._state(arena, unit)
        return torch.cat(parts) if parts else arena[:0].clone()

    def store_state_(self, arena: Tensor, values: Tensor, unit: int = 1) -> None:
        """Put values in the form of `collect_state` back."""
        parts = self._state(arena, unit)
        _copy(parts, list(values.split([part.numel() for part in parts])))

    def collect_wire(self, wire: Tensor, nbytes: int) -> Tensor:
        """uint8 [num_blocks, nbytes]: the payloads of all blocks."""
        parts = self._wire(wire, nbytes)
        return torch.cat(parts).view(-1, nbytes) if parts else wire[:0].view(0, nbytes)

    def store_wire_(self, wire: Tensor, payload: Tensor) -> None:
        parts = self._wire(wire, payload.shape[1])
        _copy(parts, list(payload.reshape(-1).split([part.numel() for part in parts])))

    def valid(self, device: torch.device) -> Tensor:
        """Boolean [num_blocks, block_size]: False on padding."""
        return self._tables(device)[1].view(-1, self.block_size)

    def idle(self, packed: Tensor) -> Tensor:
        """Boolean [numel]: True in pieces that are zero throughout."""
        pieces = packed.split(self.lengths)
        zero = torch.stack([norm == 0 for norm in torch._foreach_norm(list(pieces), torch.inf)])
        return zero[self._tables(packed.device)[2]]

    def noise(self, seed: int, stream: int, device: torch.device) -> Tensor:
        """float32 [num_blocks, block_size] in [-0.5, 0.5): each piece's own numbers, whatever the bucket."""
        index, _, piece = self._tables(device)
        keys = torch.tensor([stream_key(seed, row.salt, stream) for row in self.source.rows], device=device)
        return dither_at(index, keys[piece]).view(-1, self.block_size)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of every packed element: its index in its piece, whether it is real, which piece it belongs to."""
        if device not in self._index:
            index = torch.cat([torch.arange(length) for length in self.lengths])
            piece = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
            numel = torch.tensor([row.numel for row in self.source.rows])
            self._index[device] = (index.to(device), (index < numel[piece]).to(device), piece.to(device))
        return self._index[device]

    @staticmethod
    def _pieces(x: Tensor, segments: Segments) -> list[Tensor]:
        return [x[row.x_offset : row.x_offset + row.numel] for row in segments.rows]

    def _state(self, arena: Tensor, unit: int) -> list[Tensor]:
        starts = (row.state_offset // unit for row in self.source.rows)
        return [arena[s : s + length // unit] for s, length in zip(starts, self.lengths, strict=True)]

    def _wire(self, wire: Tensor, nbytes: int) -> list[Tensor]:
        sizes = (length // self.block_size * nbytes for length in self.lengths)
        starts = (row.wire_offset for row in self.source.rows)
        return [wire[s : s + size] for s, size in zip(starts, sizes, strict=True)]


def pack_segments(segments: Segments, block_size: int) -> Packed:
    """The packing of a table, made once and kept with it."""
    key = ("packed", block_size)
    packed = segments.cache.get(key)
    if not isinstance(packed, Packed):
        packed = segments.cache[key] = Packed(segments, block_size)
    return packed


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
