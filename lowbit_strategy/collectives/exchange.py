"""Compressed reduce-scatter and all-reduce of one bucket, over any mix of codecs.

reduce-scatter (the uplink): (1) every codec encodes each parameter's W chunks into W messages, scales inline; (2) one
all-to-all of bytes; (3) the owner decodes the W contributions to its chunks and adds them in float32, in rank order.

all-reduce: the same, then the downlink: (4) the owner encodes the mean of its chunks, with a residual of its own;
(5) one all-gather of bytes; (6) every rank decodes every chunk. All ranks decode the same bytes: results are
bit-identical.

A message starts with a 16-byte header: magic and a checksum of the layout, so that ranks that disagree notice instead
of adding garbage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ALIGNMENT, Slot, round_up, salt_of
from lowbit_strategy.collectives.stateful_codec import StatefulCodec, StateTensors
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.kernels.segments import Segment, Segments

HEADER_NBYTES = 16
_MAGIC = 0x4C4F5742  # "LOWB"


class Hop(NamedTuple):
    """A codec on one hop with the state that its segments' ``state_offset`` point into."""

    stateful: StatefulCodec
    state: StateTensors


class Route(NamedTuple):
    """What carries one group of parameters: its codecs on both hops, and where its state starts.

    ``full_offset`` and ``shard_offset`` give each parameter's first element in arenas that hold whole parameters and
    in those that hold only the own chunk. A chunk's state is a multiple of `block_size`: whole blocks of both codecs.
    """

    uplink: Hop
    downlink: Hop
    slots: tuple[Slot, ...]
    full_offset: Mapping[str, int]
    shard_offset: Mapping[str, int]
    block_size: int


class _Place(NamedTuple):
    """Where one parameter stands in the two messages and in the buffer of owned means."""

    slot: Slot
    uplink: int
    downlink: int
    shard: int


class _RouteTables(NamedTuple):
    send: Segments
    own: Segments
    downlink: Segments
    gather: Segments


def layout_header(layout: bytes, device: torch.device) -> Tensor:
    """uint8 [16]: what a message starts with, by which ranks notice that their layouts differ."""
    header = struct.pack("<II", _MAGIC, zlib.crc32(layout)).ljust(HEADER_NBYTES, b"\0")
    return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)


class Exchange:
    """The exchanges of one bucket. Tables are made once and serve every step; memory for messages is borrowed.

    Args:
        routes: The codecs and which parameters each pair of them carries.
        comm: Group to exchange over.
        device: Where gradients and messages lie.
        scatter: Reduce-scatter (the owned chunks are the result) instead of all-reduce.
        buffers: Lends memory for messages.
        flags: Where this rank notes that it puts in inf or NaN, or owns a mean that is, and that a message did not
            have the expected layout.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        comm: Comm,
        device: torch.device,
        *,
        scatter: bool,
        buffers: WireBuffers,
        flags: StepFlags,
    ) -> None:
        self.routes = tuple(routes)
        self.comm = comm
        self.scatter = scatter
        self._buffers = buffers
        self._flags = flags
        self.uplink_nbytes = self.downlink_nbytes = HEADER_NBYTES
        self._shard_numel = 0
        placed: list[list[_Place]] = []
        for route in self.routes:
            placed.append([])
            for slot in route.slots:
                placed[-1].append(_Place(slot, self.uplink_nbytes, self.downlink_nbytes, self._shard_numel))
                row_numel = slot.cut.row_numel
                self.uplink_nbytes += round_up(route.uplink.stateful.wire_nbytes(row_numel), ALIGNMENT)
                self.downlink_nbytes += round_up(route.downlink.stateful.wire_nbytes(row_numel), ALIGNMENT)
                self._shard_numel += round_up(row_numel, ALIGNMENT)
        self._tables = [self._tabulate(route, places) for route, places in zip(self.routes, placed, strict=True)]
        layout = repr([(r.uplink.stateful, r.downlink.stateful, r.slots) for r in self.routes]).encode()
        self._header = layout_header(layout, device)

    def run(self, x: Tensor, out: Tensor, step: StepContext, sent: Tensor | None = None) -> Iterator[Pending]:
        """Reduce `x` into `out`; yields whenever bytes travel, for the caller to wait or to start another bucket.

        Args:
            x: The bucket, 1-D contiguous, laid out as in the slots.
            out: All-reduce: the mean goes here, at the places of `x`; may be `x` itself. Reduce-scatter: the *sum*
                of the owned chunks, since FSDP2 divides afterwards.
            step: Counter and seeds.
            sent: float32, as `x`: filled with what the other ranks decode of this rank's messages, or None.
        """
        world_size, flag = self.comm.world_size, self._flags.overflow
        send = self._message(world_size, self.uplink_nbytes)
        flat = send.view(-1)
        for route, tables in self._routes():
            codec, state = route.uplink
            for part in codec.turns(tables.send, x.device):
                codec.encode_(x, flat, part, state, step, flag)
                if sent is not None:
                    codec.decode_sent_(flat, sent, part, state)
        received = self._buffers.borrow(world_size, self.uplink_nbytes)
        yield self.comm.all_to_all(received, send)
        self._flags.check_layout(received, self._header, self.comm.rank)
        shard, alpha = (out, 1.0) if self.scatter else (self._means(), 1.0 / world_size)
        for route, tables in self._routes():
            codec, state = route.uplink
            for part in codec.turns(tables.own, x.device):
                codec.decode_sum_(received, shard, part, state, alpha)
        self._buffers.give_back(send, received)
        if not self.scatter:
            yield from self._return(shard, out, step)

    def _return(self, means: Tensor, out: Tensor, step: StepContext) -> Iterator[Pending]:
        """The downlink: the owned means to everyone."""
        message = self._message(1, self.downlink_nbytes)
        flat = message.view(-1)
        for route, tables in self._routes():
            codec, state = route.downlink
            for part in codec.turns(tables.downlink, means.device):
                codec.encode_(means, flat, part, state, step, self._flags.overflow)
        self._buffers.give_back(means.view(torch.uint8))
        gathered = self._buffers.borrow(self.comm.world_size, self.downlink_nbytes)
        yield self.comm.all_gather(gathered, flat)
        for route, tables in self._routes():
            codec, state = route.downlink
            for part in codec.turns(tables.gather, out.device):
                codec.decode_sum_(gathered.view(1, -1), out, part, state, 1.0)
        self._buffers.give_back(message, gathered)

    def _message(self, rows: int, nbytes: int) -> Tensor:
        """uint8 ``[rows, nbytes]`` with the header in every row."""
        wire = self._buffers.borrow(rows, nbytes)
        wire[:, :HEADER_NBYTES] = self._header
        return wire

    def _means(self) -> Tensor:
        """float32: room for the means of the owned chunks."""
        return self._buffers.borrow(1, 4 * max(self._shard_numel, 1)).view(-1).view(torch.float32)

    def _routes(self) -> Iterator[tuple[Route, _RouteTables]]:
        return zip(self.routes, self._tables, strict=True)

    def _tabulate(self, route: Route, places: Sequence[_Place]) -> _RouteTables:
        world_size, rank = self.comm.world_size, self.comm.rank
        send, own, downlink, gather = [], [], [], []
        for slot, uplink_at, downlink_at, shard_at in places:
            cut = slot.cut
            full, shard = route.full_offset[slot.name], route.shard_offset[slot.name]
            row_state = round_up(cut.row_numel, route.block_size)
            for r in range(world_size):
                if length := cut.row_length(r):
                    x_at, state_at = slot.offset + r * slot.stride, full + r * row_state
                    salt = salt_of(slot.name, r)
                    send.append(Segment(x_at, length, state_at, r * self.uplink_nbytes + uplink_at, salt))
                    gather.append(Segment(x_at, length, state_at, r * self.downlink_nbytes + downlink_at, salt))
            if length := cut.row_length(rank):
                out_at = slot.offset if self.scatter else shard_at
                own.append(Segment(out_at, length, shard, uplink_at, salt_of(slot.name, rank)))
                downlink.append(Segment(out_at, length, shard, downlink_at, salt_of(slot.name, world_size + rank)))
        return _RouteTables(Segments(send), Segments(own), Segments(downlink), Segments(gather))
