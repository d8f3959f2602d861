"""Compressed reduce-scatter and all-reduce of one bucket, over any mix of codecs.

reduce-scatter (the uplink): (1) every codec encodes each parameter's W shares into W messages, scales inline; (2) one
all-to-all of bytes; (3) the owner decodes the W contributions to its shares and adds them in float32, in rank order.

all-reduce: the same, then the downlink: (4) the owner encodes the mean of its shares, with its own residual; (5) one
all-gather of bytes; (6) every rank decodes every share. All ranks decode the same bytes, so results are bit-identical.

A message starts with a header of 16 bytes, or more for more than 64 parameters. It holds a magic number, a checksum of
the layout, and on FSDP2's uplink a bit for each parameter for which the sender had no gradient. Owners check the header
at once on a CPU, and in a later `end_step` on CUDA.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ALIGNMENT, ParamView, round_up, salt_of
from lowbit_strategy.collectives.step_flags import CHECKED_NBYTES, StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.kernels.segments import Segment, Segments

HEADER_NBYTES = 16
_MAGIC = 0x4C4F5742  # "LOWB"


class CodedGroup(NamedTuple):
    """Parameters that share codecs, and the codecs' state.

    Args:
        uplink, uplink_state: Codec of messages to the owners of shares.
        downlink, downlink_state: Codec of messages from the owners, in an all-reduce. None: reduce-scatter, where the
            owners keep the result.
        block_size: State of a share is padded to a multiple of this, a whole number of blocks of both codecs.
        params: Where the parameters lie in the bucket.
    """

    uplink: Codec
    uplink_state: StateTensors
    downlink: Codec | None
    downlink_state: StateTensors
    block_size: int
    params: tuple[ParamView, ...]


class _Hop(NamedTuple):
    """A codec with its state, and the tables of segments that it encodes and decodes in turn."""

    codec: Codec
    state: StateTensors
    encoded: tuple[Segments, ...]
    decoded: tuple[Segments, ...]


def marks_nbytes(num_params: int) -> int:
    """Bytes needed for one bit per parameter, set if a rank had no gradient for it."""
    return -(-num_params // 8)


def header_nbytes(num_marked: int = 0) -> int:
    """Size of the header of a message with `num_marked` marks."""
    return round_up(CHECKED_NBYTES + marks_nbytes(num_marked), ALIGNMENT)


def message_nbytes(sizes: Iterable[int], num_marked: int = 0) -> int:
    """Size of a message with a header and these sections."""
    return header_nbytes(num_marked) + sum(round_up(size, ALIGNMENT) for size in sizes)


def layout_header(layout: bytes, device: torch.device, num_marked: int = 0) -> Tensor:
    """The uint8 header of a message, by which ranks notice that their layouts differ. No mark is set."""
    header = struct.pack("<II", _MAGIC, zlib.crc32(layout)).ljust(header_nbytes(num_marked), b"\0")
    return torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)


def and_rows_(rows_WB: Tensor, out_B: Tensor) -> None:
    """Write into `out_B` the bits that are set in all rows."""
    total_B = rows_WB[0].clone()
    for row_B in rows_WB[1:]:
        total_B &= row_B
    out_B.copy_(total_B)


class Exchange:
    """The exchanges of one bucket. Tables are made once and used in every step; memory for messages is borrowed.

    Args:
        groups: The codecs and their parameters. Either all groups have a downlink, or none has.
        comm: Ranks to exchange with.
        device: Where gradients and messages lie.
        buffers: Lends memory for messages.
        flags: Records that this rank contributes inf or NaN, owns such a mean, or received a message with a different
            layout.
        alpha: Reduce-scatter: factor that multiplies the sums.
        num_marked: Number of parameters that have a mark on the uplink.
    """

    def __init__(
        self,
        groups: Sequence[CodedGroup],
        comm: Comm,
        device: torch.device,
        *,
        buffers: WireBuffers,
        flags: StepFlags,
        alpha: float = 1.0,
        num_marked: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.comm = comm
        self._buffers = buffers
        self._flags = flags
        self._alpha = alpha
        self._header_nbytes = self.uplink_nbytes = header_nbytes(num_marked)
        self.downlink_nbytes = HEADER_NBYTES
        for group in self.groups:
            for param in group.params:
                self.uplink_nbytes += _section_nbytes(group.uplink, param)
                if group.downlink is not None:
                    self.downlink_nbytes += _section_nbytes(group.downlink, param)
        self._shard_numel = 0
        self._uplinks: list[_Hop] = []
        self._downlinks: list[_Hop] = []
        self._tabulate(device)
        layout = [
            (each.uplink, each.downlink, [param.common_layout() for param in each.params]) for each in self.groups
        ]
        self._header = layout_header(repr(layout).encode(), device, num_marked)

    def run(
        self,
        x: Tensor,
        out: Tensor,
        step: StepContext,
        trace: Callable[[Tensor], None] | None = None,
        marks: Tensor | None = None,
    ) -> Iterator[Pending]:
        """Reduce `x` into `out`. Yields whenever bytes travel, so that the caller can wait or start another bucket.

        Args:
            x: The bucket, 1-D and contiguous, with the layout of the groups' parameters.
            out: All-reduce: receives the mean, laid out as `x`, and may be `x` itself. Reduce-scatter: receives `alpha`
                times the *sum* of the owned shares, since FSDP2 divides afterwards.
            step: Counter and seeds.
            trace: Called with what the other ranks decode from this rank's messages, float32 of the shape of `x`, while
                `x` is unchanged; None: no observer.
            marks: uint8 bits of the parameters for which this rank had no gradient; afterwards, of those for which no
                rank had one. None: this rank had all gradients and does not need the result.
        """
        world_size, flag = self.comm.world_size, self._flags.overflow
        send = self._buffers.borrow(world_size, self.uplink_nbytes)
        send[:, : self._header_nbytes] = self._header
        if marks is not None:
            send[:, CHECKED_NBYTES : CHECKED_NBYTES + marks.numel()] = marks
        flat = send.view(-1)
        for codec, state, tables, _ in self._uplinks:
            for table in tables:
                codec.encode_(x, flat, table, state, step, flag)
        if trace is not None:
            trace(self._sent(flat, torch.empty_like(x, dtype=torch.float32)))
        received = self._buffers.borrow(world_size, self.uplink_nbytes)
        yield self.comm.all_to_all(received, send)
        self._flags.check_layout(received, self._header, self.comm.rank)
        if marks is not None:
            and_rows_(received[:, CHECKED_NBYTES : CHECKED_NBYTES + marks.numel()], marks)
        if not self._downlinks:
            self._decode(self._uplinks, received, out, self._alpha)
            self._buffers.give_back(send, received)
            return
        owned = self._buffers.borrow(1, 4 * max(self._shard_numel, 1)).view(-1)
        means = owned.view(torch.float32)
        self._decode(self._uplinks, received, means, 1.0 / world_size)
        self._buffers.give_back(send, received)
        message = self._buffers.borrow(1, self.downlink_nbytes).view(-1)  # the downlink sends owned means to all ranks
        message[:HEADER_NBYTES] = self._header[:HEADER_NBYTES]
        for codec, state, tables, _ in self._downlinks:
            for table in tables:
                codec.encode_(means, message, table, state, step, flag)
        self._buffers.give_back(owned)
        gathered = self._buffers.borrow(world_size, self.downlink_nbytes)
        yield self.comm.all_gather(gathered, message)
        self._decode(self._downlinks, gathered.view(1, -1), out, 1.0)
        self._buffers.give_back(message, gathered)

    def _sent(self, wire: Tensor, out: Tensor) -> Tensor:
        for codec, state, tables, _ in self._uplinks:
            for table in tables:
                codec.decode_sent_(wire, out, table, state)
        return out

    @staticmethod
    def _decode(hops: Sequence[_Hop], wire_WB: Tensor, out: Tensor, alpha: float) -> None:
        for codec, state, _, tables in hops:
            for table in tables:
                codec.decode_sum_(wire_WB, out, table, state, alpha)

    def _tabulate(self, device: torch.device) -> None:
        """Make the tables of what each codec encodes and decodes: its place in the bucket, in the messages and among
        the owned means, group by group and parameter by parameter.
        """
        world_size, rank = self.comm.world_size, self.comm.rank
        uplink_at, downlink_at = self._header_nbytes, HEADER_NBYTES
        for uplink, uplink_state, downlink, downlink_state, block_size, params in self.groups:
            send, own, back, gather = [], [], [], []
            for param in params:
                name, state_at = param.name, param.state_offset
                send += param.segments(uplink_at, self.uplink_nbytes, block_size)
                gather += param.segments(downlink_at, self.downlink_nbytes, block_size)
                if length := param.row_length(rank):
                    out_at = param.offset if param.out_offset is None else param.out_offset
                    out_at = out_at if downlink is None else self._shard_numel
                    own.append(Segment(out_at, length, state_at, uplink_at, salt_of(name, rank)))
                    back.append(Segment(out_at, length, state_at, downlink_at, salt_of(name, world_size + rank)))
                uplink_at += _section_nbytes(uplink, param)
                downlink_at += 0 if downlink is None else _section_nbytes(downlink, param)
                self._shard_numel += round_up(param.row_numel, ALIGNMENT)
            sent, added = uplink.batches(Segments(send), device), uplink.batches(Segments(own), device)
            self._uplinks.append(_Hop(uplink, uplink_state, sent, added))
            if downlink is not None:
                sent, added = downlink.batches(Segments(back), device), downlink.batches(Segments(gather), device)
                self._downlinks.append(_Hop(downlink, downlink_state, sent, added))


def _section_nbytes(codec: Codec, param: ParamView) -> int:
    return round_up(codec.wire_nbytes(param.row_numel), ALIGNMENT)
