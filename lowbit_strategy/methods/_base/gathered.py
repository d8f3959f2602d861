"""One hop for any codec: every rank's message goes to all ranks, so that nothing is coded a second time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.stateful_codec import StepContext
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredReducer(Reducer):
    """The mean of what all ranks' messages decode to.

    1. every rank encodes its gradient
    2. one all-gather of bytes: each rank sends W - 1 times what a message has
    3. every rank decodes all messages and adds them in rank order

    Args:
        codec: Of a whole parameter.
    """

    codec: Codec

    fixed_size: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{self.codec.label}, gathered"

    def keeps_zeros(self, spec: TensorSpec) -> bool:
        return self.codec.keeps_zeros

    def nearest(self) -> GatheredReducer:
        return GatheredReducer(codec=self.codec.nearest())

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        wires = []
        for view in views:
            g_N = view.flat().float()
            wires.append(self.codec.encode(g_N, seed=step.seed ^ zlib.crc32(view.spec.name.encode())))
            if view.compensated is not None:
                view.compensated.copy_(g_N)
        message = torch.cat(wires)
        received_WB = message.new_empty(comm.world_size, message.numel())
        yield comm.all_gather(received_WB, message)
        for view, wire_WB in zip(views, received_WB.split([wire.numel() for wire in wires], dim=1), strict=True):
            mean_N = self._decode(wire_WB, view.spec.numel) / comm.world_size
            if view.sent is not None:
                view.sent.copy_(self._decode(wire_WB[comm.rank, None], view.spec.numel))
            view.write_mean_(mean_N, comm.rank)

    def _decode(self, wire_WB: Tensor, numel: int) -> Tensor:
        return self.codec.decode_sum(wire_WB.contiguous(), numel)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 1

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return (world_size - 1) * self.codec.wire_nbytes(spec.numel)
