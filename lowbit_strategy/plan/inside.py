"""What gradients send inside a node, around what the ranks with the same part send between nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.exchange import HEADER_NBYTES
from lowbit_strategy.collectives.layout import ALIGNMENT, TensorSpec, dim0_row_numel, round_up
from lowbit_strategy.collectives.ordered import MESSAGE_NBYTES, pieces_of_rows
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.plan.messages import Message, TransferGroup
from lowbit_strategy.ranks.topology import Topology

Layout = Literal["ddp", "fsdp", "hsdp"]

_BLOCK_SIZE = 128  # LoCo's


def node_codec(bits: int, *, exact: bool) -> Codec:
    """What codes a parameter inside a node, where gradients travel there as codes."""
    return DenseCodec() if exact else BlockCodec(uniform(bits, _BLOCK_SIZE))


def node_transfer(
    specs: Mapping[str, TensorSpec],
    names: Sequence[str],
    itemsize: int,
    topology: Topology,
    layout: Layout,
    exact: Collection[str],
) -> TransferGroup:
    """Of one bucket: its sums, and under DDP the gather of its parts.

    Args:
        specs: Of all parameters.
        names: Of the bucket's.
        itemsize: Of an element of a gradient, in bytes.
        topology: The ranks.
        layout: What wraps the model.
        exact: Parameters whose sums are exact where those of others are codes.
    """
    num_inside, rows = topology.num_parts, {name: _rows(specs[name], topology, layout) for name in names}
    numel = sum(map(math.prod, rows.values()))
    whole, mean = num_inside * numel * itemsize, numel * itemsize
    in_series = len(pieces_of_rows(numel, num_inside * itemsize))
    sums = Message("intra-node", "reduce-scatter", whole - mean, in_series=in_series, internode_fraction=0.0)
    gather = (replace(sums, what="all-gather"),) if layout == "ddp" else ()
    copied, encoded = (2 * whole if layout == "ddp" else 0), 0  # the bucket is filled with what comes back
    if topology.intra is None:
        piece = min(whole, MESSAGE_NBYTES)
        messages = piece if piece == whole else 2 * piece  # what is sent as one the framework has too, or gloo for it
        copied = 0 if layout == "hsdp" else copied + 3 * whole + mean  # HSDP's sums are FSDP2's own, part of its step
    else:
        row_nbytes = HEADER_NBYTES
        for name, (num_rows, row_numel) in rows.items():
            codec = node_codec(topology.intra, exact=name in exact)
            row_nbytes += num_rows * round_up(codec.wire_nbytes(row_numel), ALIGNMENT)
        sums = replace(sums, nbytes=(num_inside - 1) * row_nbytes, in_series=1)
        messages, encoded = 2 * num_inside * row_nbytes, num_inside * numel
    kept = {"ddp": messages + mean + whole, "fsdp": mean, "hsdp": 0}[layout]  # under HSDP FSDP2 has the mean
    brief = 0 if layout == "ddp" else messages
    return TransferGroup("", numel, (sums, *gather), 1, kept, encoded, brief, copied)


def part_numel(specs: Mapping[str, TensorSpec], names: Sequence[str], topology: Topology, layout: Layout) -> int:
    """Elements of a bucket's largest part, padding included."""
    return sum(math.prod(_rows(specs[name], topology, layout)) for name in names)


def _rows(spec: TensorSpec, topology: Topology, layout: Layout) -> tuple[int, int]:
    """How many rows of how many elements a rank has for each rank of its node, of one parameter."""
    if layout == "hsdp":
        return 1, dim0_row_numel(spec.whole.shape, topology.num_parts)
    (part,) = replace(topology, rank=0).own_parts([spec.whole], sharded=spec.sharded)
    return (1, part.ranges[0][1]) if part.part_row_numel is None else (topology.num_peers, part.part_row_numel)
