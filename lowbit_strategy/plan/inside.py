"""What gradients send inside a node, around what the ranks with the same part send between nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.exchange import HEADER_NBYTES
from lowbit_strategy.collectives.layout import ALIGNMENT, dim0_cut, round_up
from lowbit_strategy.collectives.ordered import MESSAGE_NBYTES, pieces_of_rows
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.plan.messages import Message
from lowbit_strategy.ranks.topology import Topology

Layout = Literal["ddp", "fsdp", "hsdp"]

_BLOCK_SIZE = 128  # LoCo's


def node_codec(bits: int, *, exact: bool) -> Codec:
    """What codes a parameter inside a node, where gradients travel there as codes."""
    return DenseCodec() if exact else BlockCodec(uniform(bits, _BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class NodeTransfer:
    """Of one bucket.

    Args:
        scatter: Its sums.
        gather: Under DDP, of its parts.
        buffer_nbytes, brief_nbytes, copied_nbytes, encoded_numel: As in `TransferGroup`.
    """

    scatter: tuple[Message, ...] = ()
    gather: tuple[Message, ...] = ()
    buffer_nbytes: int = 0
    brief_nbytes: int = 0
    copied_nbytes: int = 0
    encoded_numel: int = 0


def node_transfer(
    specs: Mapping[str, TensorSpec],
    names: Sequence[str],
    itemsize: int,
    topology: Topology,
    layout: Layout,
    exact: Collection[str],
) -> NodeTransfer:
    """Args:
    specs: Of all parameters.
    names: Of the bucket's.
    itemsize: Of an element of a gradient, in bytes.
    topology: The ranks.
    layout: What wraps the model.
    exact: Parameters whose sums are exact where those of others are codes.
    """
    others, numel = topology.num_parts - 1, part_numel(specs, names, topology, layout)
    sums = Message(
        "intra-node",
        "reduce-scatter",
        others * numel * itemsize,
        in_series=len(pieces_of_rows(numel, topology.num_parts * itemsize)),
        internode_fraction=0.0,
    )
    gather = (replace(sums, what="all-gather"),) if layout == "ddp" else ()
    whole, mean = topology.num_parts * numel * itemsize, numel * itemsize
    taken_apart = 2 * whole if layout == "ddp" else 0
    if topology.intra is not None:
        row = _coded_nbytes(specs, names, topology, layout, exact)
        sums = replace(sums, nbytes=others * row, in_series=1)
        messages = 2 * topology.num_parts * row
        copied, encoded = taken_apart, topology.num_parts * numel
    else:
        piece = min(whole, MESSAGE_NBYTES)
        messages = piece if piece == whole else 2 * piece  # what is sent as one the framework has too, or gloo for it
        copied, encoded = (0 if layout == "hsdp" else taken_apart + 3 * whole + mean), 0  # HSDP's are part of its step
    if layout == "ddp":  # of each bucket that is under way; else of one at a time
        return NodeTransfer((sums,), gather, messages + mean + whole, 0, copied, encoded)
    return NodeTransfer((sums,), gather, 0 if layout == "hsdp" else mean, messages, copied, encoded)


def part_numel(specs: Mapping[str, TensorSpec], names: Sequence[str], topology: Topology, layout: Layout) -> int:
    """Elements of a bucket's largest part, padding included."""
    return sum(num_rows * numel for num_rows, numel in (_rows(specs[name], topology, layout) for name in names))


def _rows(spec: TensorSpec, topology: Topology, layout: Layout) -> tuple[int, int]:
    """How many rows of how many elements a rank has for each rank of its node, of one parameter."""
    if layout == "hsdp":
        return 1, dim0_cut(spec.whole.shape, topology.num_parts).row_numel
    part = replace(topology, rank=0).own_part(spec.whole, sharded=spec.sharded).part
    assert part is not None
    return (1, part.ranges[0][1]) if part.row_numel is None else (topology.num_peers, part.row_numel)


def _coded_nbytes(
    specs: Mapping[str, TensorSpec],
    names: Sequence[str],
    topology: Topology,
    layout: Layout,
    exact: Collection[str],
) -> int:
    """Bytes of the message to another rank of the node."""
    assert topology.intra is not None
    total = HEADER_NBYTES
    for name in names:
        num_rows, numel = _rows(specs[name], topology, layout)
        codec = node_codec(topology.intra, exact=name in exact)
        total += num_rows * round_up(codec.wire_nbytes(numel), ALIGNMENT)
    return total
