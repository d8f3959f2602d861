"""Means over the ranks of a node, sent as codes, for nodes whose inner links are slow too (`intra`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.exchange import CodedGroup, Exchange
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, dim0_row_numel
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.method_state import MethodState
from lowbit_strategy.engine.node_means import Cut, NodeMeans
from lowbit_strategy.ranks.topology import NodeCoding

_NO_RANDOMNESS = StepContext(0, 0, 0)


class CodedMeans(NodeMeans):
    """Replaces the exact sums inside a node, with a quarter of float32's bytes and with an error.

    1. each rank codes its values for every other rank of the node as blocks of integers with a scale, rounded to
       nearest
    2. one all-to-all inside the node
    3. each rank decodes all contributions to its part and adds them in float32, in rank order

    The error is at most half a step of the grid, which with 8 bits is 1/250 of a block's largest magnitude. No residual
    keeps it: the conservation laws hold for the means that leave the node. Rounding to nearest has the least error and
    needs no random numbers. Parameters that are sent between nodes as float32 are sent so here, too.

    Args:
        coding: The codes.
        state: The methods of parameters.
        comm: The ranks of the node.
        device: Device of gradients.

    References:
        Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM Training",
        2024, arXiv 2410.15526.
    """

    def __init__(self, coding: NodeCoding, state: MethodState, comm: Comm, device: torch.device) -> None:
        super().__init__(comm, device)
        self._coding, self._state, self._device = coding, state, device
        self._assignments: Mapping[str, object] = {}
        self._exchanges: dict[BucketLayout, Exchange] = {}  # while parameters keep their methods
        self._buffers = WireBuffers(device)

    def mean(self, cut: Cut, x: Tensor, part_N: Tensor, buffers: WireBuffers) -> Iterator[Pending]:
        return self._exchange(cut.layout, lambda: cut.params, buffers).run(x, part_N, _NO_RANDOMNESS)

    def mean_of_rows(
        self, layout: BucketLayout, x: Tensor, out_GN: Tensor, buffers: WireBuffers | None = None
    ) -> Iterator[Pending]:
        names = layout.names or tuple(name for name, _ in layout.entries)

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

        return self._exchange(layout, params, self._buffers).run(x, out_GN.view(-1), _NO_RANDOMNESS)

    def end_step(self) -> None:
        self._buffers.reclaim()
        self.flags.raise_if_broken(self._comm.rank)

    def _exchange(
        self, layout: BucketLayout, params: Callable[[], Iterable[ParamView]], buffers: WireBuffers
    ) -> Exchange:
        """The exchange of a bucket's parameters. `params`: where they lie in the bucket and in this rank's part."""
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
        return self._exchanges[layout]

    def _groups(self, params: Iterable[ParamView]) -> list[CodedGroup]:
        by_codec: dict[Codec, list[ParamView]] = {}
        for param in params:
            codec = self._coding.codec(exact=self._state.assignments[param.name].is_exact)
            by_codec.setdefault(codec, []).append(param)
        return [CodedGroup(codec, {}, None, {}, codec.block_size, tuple(own)) for codec, own in by_codec.items()]
