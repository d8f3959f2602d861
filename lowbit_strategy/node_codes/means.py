"""Means over the ranks of a node, sent as codes: for nodes whose links inside are slow, too (`intra`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.collectives.exchange import CodedGroup, Exchange, StepFlags, WireBuffers
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, dim0_row_numel
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.node_codes.codec import node_codec
from lowbit_strategy.ranks.ranks import Ranks

_NO_RANDOMNESS = StepContext(0, 0, 0)


class NodeCodes:
    """What the exact sums inside a node do, in a quarter of the bytes of float32 and with an error.

    1. each rank codes what it has for every other rank of the node: blocks of integers with a scale, rounded to nearest
    2. one all-to-all inside the node
    3. each rank decodes all contributions to its part and adds them in float32, in rank order

    The error is at most half a step of the grid, with 8 bits 1/250 of a block's largest magnitude. It is in no
    residual: the laws of conservation hold for the means that leave the node. Rounding to nearest has the least error
    and needs no random numbers. Parameters that travel between nodes as float32 do so here.

    Args:
        state: The methods of parameters.
        ranks: Those of a node send each other codes.
        device: Device of gradients.

    References:
        Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
        2024, arXiv 2410.15526.
    """

    def __init__(self, state: MethodState, ranks: Ranks, device: torch.device) -> None:
        assert ranks.intra_node is not None
        assert ranks.intra is not None
        self._state, self._comm, self._bits, self._device = state, ranks.intra_node, ranks.intra, device
        self._assignments: Mapping[str, object] = {}
        self._exchanges: dict[BucketLayout, Exchange] = {}  # while parameters keep their methods
        self.flags = StepFlags(device)
        self.buffers = WireBuffers(device)

    def mean(
        self,
        layout: BucketLayout,
        params: Callable[[], Iterable[ParamView]],
        x: Tensor,
        out: Tensor,
        buffers: WireBuffers,
    ) -> Iterator[Pending]:
        """The mean of one part of a bucket, in whose place `out` is written; yields while bytes travel.

        Args:
            layout: Tells buckets apart.
            params: Where its parameters lie in `x` and `out`, all of them on every rank; called once.
            x: The bucket, 1-D.
            out: The own part, 1-D.
            buffers: Memory for messages.
        """
        if self._assignments is not self._state.assignments:
            self._assignments, self._exchanges = self._state.assignments, {}
        if layout not in self._exchanges:
            self._exchanges[layout] = Exchange(
                self._groups(params()),
                self._comm,
                self._device,
                buffers=buffers,
                flags=self.flags,
                alpha=1.0 / self._comm.world_size,
            )
        return self._exchanges[layout].run(x, out, _NO_RANDOMNESS)

    def mean_of_rows(self, layout: BucketLayout, names: Iterable[str], x: Tensor, out_GN: Tensor) -> Iterator[Pending]:
        """The same where FSDP2 has put a row for each rank together: of G nodes, or of the own node alone.

        `names`: the parameters in a row.
        """

        def params() -> Iterator[ParamView]:
            num_inside, (num_nodes, row_numel) = self._comm.world_size, out_GN.shape
            at = 0
            for name in names:
                numel = dim0_row_numel(self._state.specs[name].whole.shape, num_nodes * num_inside)
                spec = TensorSpec(name, (num_inside * numel,))  # with FSDP2's padding, which is zero
                for node in range(num_nodes):
                    start = node * num_inside * row_numel + at
                    yield ParamView(spec, num_inside, numel, start, row_numel, out_offset=node * row_numel + at)
                at += numel

        return self.mean(layout, params, x, out_GN.view(-1), self.buffers)

    def end_step(self) -> None:
        """Raises:
        RuntimeError: On CUDA: in an earlier step a rank of the node sent a message of another layout.
        """
        self.buffers.reclaim()
        self.flags.raise_if_broken(self._comm.rank)

    def _groups(self, params: Iterable[ParamView]) -> list[CodedGroup]:
        by_codec: dict[Codec, list[ParamView]] = {}
        for param in params:
            codec = node_codec(self._bits, exact=self._state.assignments[param.name].is_exact)
            by_codec.setdefault(codec, []).append(param)
        return [CodedGroup(codec, {}, None, {}, codec.block_size, tuple(own)) for codec, own in by_codec.items()]
