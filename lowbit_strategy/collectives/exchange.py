"""Compressed reduce-scatter and all-reduce of one bucket, over any mix of codecs.

reduce-scatter: (1) every lane encodes each parameter's W chunks into W messages, scales inline; (2) one all-to-all of
bytes; (3) the owner decodes the W contributions of its chunks and adds them in float32, in rank order.

all-reduce: the same, then (4) the owner encodes the mean of its chunks, with a residual of its own; (5) one all-gather
of bytes; (6) every rank decodes every chunk. All ranks decode the same bytes: results are bit-identical.

A message starts with a 16-byte header: magic and a checksum of the layout, so that ranks that disagree notice instead
of adding garbage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending, empty_wire
from lowbit_strategy.collectives.layout import ALIGNMENT, Slot, round_up
from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32
from lowbit_strategy.kernels.segments import Segment, Segments

HEADER_NBYTES = 16
_MAGIC = 0x4C4F5742  # "LOWB"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a method may know of time and chance.

    Args:
        index: Optimizer steps completed.
        seed: 32 bits, private to this rank, new each step.
        shared_seed: 32 bits, the same on all ranks, new each step.
    """

    index: int
    seed: int
    shared_seed: int


State = dict[str, Tensor]


class StatefulCodec(Protocol):
    """A codec and its residual rule, for one hop."""

    @property
    def block_size(self) -> int: ...
    def wire_nbytes(self, numel: int) -> int: ...
    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: State, step: StepContext, flag: Tensor
    ) -> None: ...
    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: State, alpha: float) -> None: ...
    def decode_sent_(self, wire: Tensor, out: Tensor, segments: Segments, state: State) -> None: ...


class Hop(NamedTuple):
    """A lane on one hop with the state that its segments' ``state_offset`` point into."""

    stateful: StatefulCodec
    state: State


class Route(NamedTuple):
    """What carries one group of parameters: its lanes on the way to the owner and back, and where its state starts.

    ``full_offset`` and ``shard_offset`` give each parameter's first element in arenas that hold whole parameters and
    in those that hold only the own chunk.
    """

    uplink: Hop
    downlink: Hop
    slots: tuple[Slot, ...]
    full_offset: Mapping[str, int]
    shard_offset: Mapping[str, int]


class _Place(NamedTuple):
    """Where one parameter stands in the two messages and in the buffer of owned means."""

    slot: Slot
    uplink: int
    downlink: int
    shard: int


class _Tables(NamedTuple):
    send: Segments
    own: Segments
    downlink: Segments
    gather: Segments


def _salt(name: str, chunk: int) -> int:
    return hash32(zlib.crc32(name.encode()) + chunk * GOLDEN)


class Exchange:
    """The exchanges of one bucket: tables and buffers are made once and serve every step.

    Args:
        routes: The lanes and which parameters each carries.
        comm: Group to exchange over.
        device: Of gradients and messages.
        scatter: Reduce-scatter (the owned chunks are the result) instead of all-reduce.

    Attributes:
        flag: int32 [1], set to 1 once this rank puts in inf or NaN, or owns a mean that is; the caller clears it.
    """

    def __init__(self, routes: Sequence[Route], comm: Comm, device: torch.device, *, scatter: bool) -> None:
        self.routes = tuple(routes)
        self.comm = comm
        self.scatter = scatter
        self.uplink_nbytes = self.downlink_nbytes = HEADER_NBYTES
        shard_numel = 0
        placed: list[list[_Place]] = []
        for route in self.routes:
            placed.append([])
            for slot in route.slots:
                placed[-1].append(_Place(slot, self.uplink_nbytes, self.downlink_nbytes, shard_numel))
                self.uplink_nbytes += round_up(route.uplink.stateful.wire_nbytes(slot.cut.row_numel), ALIGNMENT)
                self.downlink_nbytes += round_up(route.downlink.stateful.wire_nbytes(slot.cut.row_numel), ALIGNMENT)
                shard_numel += round_up(slot.cut.row_numel, ALIGNMENT)
        self._tables = [self._tabulate(route, places) for route, places in zip(self.routes, placed, strict=True)]

        world_size = comm.world_size
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._send = empty_wire(world_size, self.uplink_nbytes, device)
        self._recv = empty_wire(world_size, self.uplink_nbytes, device)
        layout = repr([(r.uplink.stateful, r.downlink.stateful, r.slots) for r in self.routes]).encode()
        self._header = struct.pack("<II", _MAGIC, zlib.crc32(layout)).ljust(HEADER_NBYTES, b"\0")
        self._send[:, :HEADER_NBYTES] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8).to(device)
        self._layout_checked = False
        if not scatter:
            self._shard = torch.zeros(shard_numel, dtype=torch.float32, device=device)
            self._back = empty_wire(1, self.downlink_nbytes, device)[0]
            self._gathered = empty_wire(world_size, self.downlink_nbytes, device)

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank puts on the wire for one reduction."""
        row = self.uplink_nbytes + (0 if self.scatter else self.downlink_nbytes)
        return row * (self.comm.world_size - 1)

    def run(self, x: Tensor, out: Tensor, step: StepContext) -> Iterator[Pending]:
        """Reduce `x` into `out`; yields whenever bytes travel, for the caller to wait or to start another bucket.

        Args:
            x: The bucket, 1-D contiguous, as the slots say.
            out: All-reduce: the mean goes here, at the places of `x`; may be `x` itself. Reduce-scatter: the *sum*
                of the owned chunks, since FSDP2 divides afterwards.
            step: Counter and seeds.
        """
        self.encode_(x, step)
        yield self.comm.all_to_all(self._recv, self._send)
        self._check_layout()
        shard, alpha = (out, 1.0) if self.scatter else (self._shard, 1.0 / self.comm.world_size)
        for route, tables in zip(self.routes, self._tables, strict=True):
            route.uplink.stateful.decode_sum_(self._recv, shard, tables.own, route.uplink.state, alpha)
        if self.scatter:
            return
        for route, tables in zip(self.routes, self._tables, strict=True):
            route.downlink.stateful.encode_(shard, self._back, tables.downlink, route.downlink.state, step, self.flag)
        yield self.comm.all_gather(self._gathered, self._back)
        flat = self._gathered.view(1, -1)
        for route, tables in zip(self.routes, self._tables, strict=True):
            route.downlink.stateful.decode_sum_(flat, out, tables.gather, route.downlink.state, 1.0)

    def encode_(self, x: Tensor, step: StepContext) -> None:
        """Fill the messages to all owners; residuals move on."""
        wire = self._send.view(-1)
        for route, tables in zip(self.routes, self._tables, strict=True):
            route.uplink.stateful.encode_(x, wire, tables.send, route.uplink.state, step, self.flag)

    def sent_(self, out: Tensor) -> None:
        """What the others decode of this rank's last messages, at the places of the bucket. For monitors."""
        wire = self._send.view(-1)
        for route, tables in zip(self.routes, self._tables, strict=True):
            route.uplink.stateful.decode_sent_(wire, out, tables.send, route.uplink.state)

    def _check_layout(self) -> None:
        """Every rank sent the header that this rank would have sent. Once on CUDA, where looking makes the host wait.

        FSDP2 modules that run on some ranks only make ranks disagree at any step.
        """
        if self._layout_checked and self._recv.is_cuda:
            return
        self._layout_checked = True
        if torch.equal(self._recv[:, :HEADER_NBYTES], self._send[:, :HEADER_NBYTES]):
            return
        for rank, header in enumerate(self._recv[:, :HEADER_NBYTES].cpu()):
            if bytes(header.tolist()) != self._header:
                raise RuntimeError(
                    f"rank {rank} sent a message of another layout than rank {self.comm.rank} expects:"
                    " the ranks' models or compressor configurations differ, or a module that FSDP2 shards by itself"
                    " ran on some ranks only (an expert?)"
                )

    def _tabulate(self, route: Route, places: Sequence[_Place]) -> _Tables:
        world_size, rank = self.comm.world_size, self.comm.rank
        send, own, downlink, gather = [], [], [], []
        for slot, uplink, downlink_at, shard_at in places:
            cut = slot.cut
            full, shard = route.full_offset[slot.name], route.shard_offset[slot.name]
            row_state = round_up(cut.row_numel, route.uplink.stateful.block_size)
            for r in range(world_size):
                if length := cut.row_length(r):
                    x_at, state_at = slot.x_offset + r * slot.x_stride, full + r * row_state
                    salt = _salt(slot.name, r)
                    send.append(Segment(x_at, length, state_at, r * self.uplink_nbytes + uplink, salt))
                    gather.append(Segment(x_at, length, state_at, r * self.downlink_nbytes + downlink_at, salt))
            if length := cut.row_length(rank):
                out_at = slot.out_offset if self.scatter else shard_at
                own.append(Segment(out_at, length, shard, uplink, _salt(slot.name, rank)))
                downlink.append(Segment(out_at, length, shard, downlink_at, _salt(slot.name, world_size + rank)))
        return _Tables(Segments(send), Segments(own), Segments(downlink), Segments(gather))
