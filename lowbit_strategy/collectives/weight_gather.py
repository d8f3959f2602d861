"""The coded all-gather of one module's weights, which sends every rank's row of shards to all ranks.

1. the owner encodes its row, parameter by parameter, into one message (`weight_rows.py`), which contains exempt
   parameters uncoded
2. one all-gather of bytes
3. every rank decodes all messages, including its own, into the rows that the module computes with

Received weights may be kept, coded or decoded, so that later gathers of the same weights send nothing. With
differences, the decoded rows are kept as a replica: the owner encodes its row minus the replica's row, and every rank
adds what it decodes to its replica. All ranks decode the same bytes, so their weights are bit-identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.weight_rows import CodecParams, RowCode
from lowbit_strategy.collectives.wire_buffers import WireBuffers


class _InFlight(NamedTuple):
    """The messages in flight: this rank's row to all ranks, and their rows to this one."""

    message: Tensor
    received: Tensor
    stages: Iterator[Pending]


class WeightGather:
    """The weights of one module on this rank: gathered if they are new, otherwise read from kept messages or rows.

    All ranks call `run` and `invalidate` in the same order.

    Args:
        parts: The row's parameters by codec. None: rows are sent uncoded.
        row_numel: Elements of a row, padding included.
        comm: Sends messages to all ranks.
        device: Where weights lie.
        keep: ``nothing``, ``codes``, if there are any, or ``replica``.
        differences: Whether messages hold differences from the replica, which must then be kept.
        buffers: Lends memory for messages.
        flags: Records messages with a different layout.

    Attributes:
        comm: The argument.
        fresh: Whether the kept weights are the owners' current weights.
        sent_digest: The digest of this rank's row when it was last sent; None: unknown, or known to be another now.
        version: Rises whenever the weights may have changed.
        num_sent: Messages sent so far; `num_exact` of them held exact rows although the module has codes.
    """

    def __init__(
        self,
        parts: Sequence[CodecParams] | None,
        row_numel: int,
        comm: Gathering,
        device: torch.device,
        *,
        keep: Literal["nothing", "codes", "replica"],
        differences: bool,
        buffers: WireBuffers,
        flags: StepFlags,
    ) -> None:
        self.row_numel = row_numel
        self.fresh = False
        self._reduced = False  # gradients have been reduced since the module was gathered for a forward pass
        self.sent_digest: Tensor | None = None
        self.version = self.num_sent = self.num_exact = 0
        self._parts = parts
        self.comm = comm
        self._device = device
        self._keep = "nothing" if parts is None and keep == "codes" else keep
        self._differences = differences and parts is not None
        self._buffers = buffers
        self._flags = flags
        self._code: RowCode | None = None
        self._codes_WB: Tensor | None = None
        self._replica: Tensor | None = None  # [W * N]
        self._in_flight: _InFlight | None = None
        self._same_on_all_ranks = False  # the replica is the same on all ranks
        self._restored: Tensor | None = None  # this rank's row of the replica in a checkpoint

    def run(self, x_N: Tensor, out: Tensor, digest: Tensor | None = None) -> Iterator[Pending]:
        """Fill `out`, ``[W * N]``, with all ranks' rows; yields while bytes travel.

        Args:
            x_N: This rank's exact row; may be its row of `out`.
            out: The result, of the same dtype.
            digest: Of this rank's row, int64 ``[1]``, if rows are compared with those that were sent.
        """
        if self.fresh:
            self._serve(out)
            return
        if self._restored is not None:
            x_N = x_N.clone()
            yield from self._send_exact(self._restored.to(x_N.dtype), out)
            self._restored = None
        if self._sends_codes(x_N.dtype):
            yield from self._send_codes(x_N, out, digest)
        else:
            yield from self._send_exact(x_N, out)
        self.fresh, self.sent_digest = self.keeps, digest

    def send_early(self, x_N: Tensor, digest: Tensor) -> None:
        """If rows are coded, send this rank's row before the module needs the others' rows; the next `run` with the
        same row receives those. Call it on all ranks.
        """
        if not self.fresh and not self.in_flight and self._restored is None and self._sends_codes(x_N.dtype):
            self._in_flight, self.sent_digest = self._begin_codes(x_N, digest), digest

    @property
    def in_flight(self) -> bool:
        """Whether rows have been sent early and not received yet."""
        return self._in_flight is not None

    def _cancel_in_flight(self) -> None:
        """Receive and discard the rows in flight, because the weights have changed."""
        if self._in_flight is not None:
            sent, self._in_flight, self.sent_digest = self._in_flight, None, None
            wait_for_all(sent.stages)
            self._return_memory(sent)

    @property
    def world_size(self) -> int:
        """The number of ranks that share the module's weights."""
        return self.comm.world_size

    @property
    def keeps(self) -> bool:
        """Whether weights are kept for later gathers."""
        return self._keep != "nothing"

    @property
    def is_ours(self) -> bool:
        """Whether this differs from FSDP2's own gathers."""
        return self._parts is not None or self.keeps

    def gradients_reduced(self) -> None:
        """Note that the next forward pass must gather again, because an optimizer will have changed the weights.

        Backward passes that are running still use the weights of their forward pass.
        """
        self._reduced = True
        self.version += 1

    def begin_forward(self) -> None:
        """Let this forward pass gather, if gradients have been reduced. Without an optimizer's step in between, owners'
        rows may still be those that were sent; then differences are 0.
        """
        if self._reduced:
            self._cancel_in_flight()
            self.fresh = self._reduced = False
            self.version += 1

    def unchanged(self) -> None:
        """Keep using the kept weights, although gradients have been reduced, because no optimizer has stepped."""
        self._reduced = False

    def invalidate(self) -> None:
        """Let the next gather send the owners' weights, because they have changed. Call it on all ranks."""
        self._cancel_in_flight()
        self.fresh, self._reduced, self.sent_digest = False, False, None
        self.version += 1

    def loaded(self) -> None:
        """Drop the replica after weights have been loaded, since differences from the old weights are useless."""
        self._cancel_in_flight()
        self.fresh, self.sent_digest = False, None
        if self._restored is None:
            self._same_on_all_ranks = False

    # -- differences across restarts ------------------------------------------------------------------------------

    def own_row(self) -> Tensor | None:
        """This rank's row as the other ranks know it, ``[N]``; None if they do not need it."""
        if self._restored is not None:
            return self._restored
        if not self._differences or not self._same_on_all_ranks or self._replica is None:
            return None
        return self._own(self._replica)

    def restore(self, row_N: Tensor | None) -> None:
        """Begin with a replica whose row of this rank is `row_N`; if that is None on all ranks, with exact weights."""
        self._cancel_in_flight()
        self.fresh, self._same_on_all_ranks, self.sent_digest = False, False, None
        self._restored = None if row_N is None else row_N.to(self._device)

    def forget(self) -> None:
        """Begin with exact weights. Call it on all ranks."""
        self.restore(None)

    def _own(self, rows: Tensor) -> Tensor:
        return rows.view(self.comm.world_size, -1)[self.comm.rank]

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def kept_nbytes(self) -> int:
        """Bytes of memory for kept weights."""
        return sum(each.nbytes for each in (self._codes_WB, self._replica) if each is not None)

    def _sends_codes(self, dtype: torch.dtype) -> bool:
        """Whether this gather sends codes; if not, it sends exact rows."""
        is_common = self._same_on_all_ranks and self._replica is not None and self._replica.dtype == dtype
        return self._parts is not None and (is_common or not self._differences)

    def _replica_of(self, dtype: torch.dtype) -> Tensor:
        if self._replica is None or self._replica.dtype != dtype:
            with torch.inference_mode(False):  # it outlives a gather without gradients
                numel = self.row_numel * self.comm.world_size
                self._replica = torch.zeros(numel, dtype=dtype, device=self._device)
        return self._replica

    def _code_of(self, dtype: torch.dtype) -> RowCode:
        if self._code is None or self._code.dtype != dtype:
            assert self._parts is not None
            self._code = RowCode(self._parts, dtype, self.comm.rank, self._device)
            self._codes_WB = None
        return self._code

    # -- one gather -----------------------------------------------------------------------------------------------

    def _serve(self, out: Tensor) -> None:
        if self._replica is not None:
            out.copy_(self._replica)
        else:
            assert self._codes_WB is not None
            code = self._code_of(out.dtype)
            code.decode_(self._codes_WB, out)
            code.decode_exact_(self._codes_WB, out)

    def _send_exact(self, row_N: Tensor, out: Tensor) -> Iterator[Pending]:
        self.num_sent += 1
        self.num_exact += self._parts is not None
        yield from self.comm.run(_bytes(out).view(self.comm.world_size, -1), _bytes(row_N))
        if self._keep == "replica":
            self._replica_of(out.dtype).copy_(out)
            self._same_on_all_ranks = True

    def _begin_codes(self, x_N: Tensor, digest: Tensor | None) -> _InFlight:
        code = self._code_of(x_N.dtype)
        self.num_sent += 1
        message, coded_N = self._buffers.borrow(1, code.nbytes), x_N
        if self._differences:
            assert self._replica is not None
            own_N = self._own(self._replica)
            sent_N = None if self.sent_digest is None else (digest == self.sent_digest) & ~own_N.isnan()
            self._replica.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)  # otherwise a block would stay NaN
            coded_N = _difference(x_N, own_N, sent_N)
        code.encode_(x_N, coded_N, message.view(-1))
        received = self._room_for_codes(code)
        stages = self.comm.run(received, message.view(-1))
        return _InFlight(message, received, itertools.chain([next(stages)], stages))

    def _send_codes(self, x_N: Tensor, out: Tensor, digest: Tensor | None) -> Iterator[Pending]:
        sent, self._in_flight = self._in_flight or self._begin_codes(x_N, digest), None
        yield from sent.stages
        code, received = self._code_of(x_N.dtype), sent.received
        self._flags.check_layout(received, code.header, self.comm.rank)
        code.decode_(received, out)
        if self._differences:
            assert self._replica is not None
            self._replica.add_(out)
            code.decode_exact_(received, self._replica)
            out.copy_(self._replica)
        else:
            code.decode_exact_(received, out)
            if self._keep == "replica":
                self._replica_of(out.dtype).copy_(out)
        self._return_memory(sent)

    def _return_memory(self, sent: _InFlight) -> None:
        self._buffers.give_back(sent.message)
        if self._keep != "codes":
            self._buffers.give_back(sent.received)

    def _room_for_codes(self, code: RowCode) -> Tensor:
        if self._keep != "codes":
            return self._buffers.borrow(self.comm.world_size, code.nbytes)
        if self._codes_WB is None:
            with torch.inference_mode(False):
                shape = (self.comm.world_size, code.nbytes)
                self._codes_WB = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        return self._codes_WB


def _difference(x_N: Tensor, replica_N: Tensor, sent_N: Tensor | None) -> Tensor:
    """``x - h`` in float32; 0 where both are the same infinity, and where `sent_N` says that x was sent before."""
    same_N = x_N == replica_N if sent_N is None else (x_N == replica_N) | sent_N
    return torch.where(same_N, 0.0, x_N.float() - replica_N.float())


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)
