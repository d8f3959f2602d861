"""The messages of FSDP2's weights, and the memory of kept weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.exchange import HEADER_NBYTES, message_nbytes
from lowbit_strategy.collectives.layout import ALIGNMENT, dim0_row_numel
from lowbit_strategy.collectives.ordered import pieces_of_rows
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.levels import ring_internode_fraction, world_internode_fraction
from lowbit_strategy.plan.messages import EXACT_WEIGHTS, Level, Message, TransferGroup
from lowbit_strategy.ranks.topology import Topology


@dataclass(frozen=True, slots=True)
class ModuleWeightCost:
    """The cost of a module's weights to a rank.

    Args:
        gather_nbytes: Bytes sent to others in each gather over the network, without framing.
        framing_nbytes: At most this many bytes for a header and the padding of every parameter, each time that codes
            are sent.
        exact_nbytes: Bytes sent to others if weights are sent uncoded.
        num_gathers: Number of gathers in a step of one forward and one backward pass.
        kept_nbytes: Bytes of memory that stay in use between gathers.
        buffer_nbytes: Memory for messages: this rank's, and the received ones unless these are kept.
        row_framing_nbytes: Exact bytes of one rank's codes; 0 if none are sent.
    """

    gather_nbytes: int
    framing_nbytes: int
    exact_nbytes: int
    num_gathers: int
    kept_nbytes: int
    buffer_nbytes: int
    row_framing_nbytes: int

    @property
    def step_nbytes(self) -> int:
        return self.gather_nbytes * self.num_gathers


def module_weights(coding: WeightCoding, layout: ModuleLayout, world_size: int) -> ModuleWeightCost:
    """The cost of one module's weights to a rank, if `world_size` ranks share them."""
    others, itemsize = world_size - 1, layout.dtype.itemsize
    rows = [dim0_row_numel(spec.shape, world_size) for spec in layout.specs]
    exact = sum(rows) * itemsize
    coded = layout.has_codes(coding)
    sizes = [row * itemsize for row in rows]
    if layout.coded:
        codecs = [coding.codec(spec) for spec in layout.specs]
        sizes = [row * itemsize if c is None else c.wire_nbytes(row) for c, row in zip(codecs, rows, strict=True)]
    own = sum(sizes)
    row_framing = message_nbytes(sizes) - own if coded else 0
    keep = "nothing" if not coded and coding.keep == "codes" else coding.keep
    kept = {"nothing": 0, "codes": own, "replica": exact}[keep] * world_size
    framing = HEADER_NBYTES + ALIGNMENT * len(rows)
    message = own + framing if coded and others else 0
    return ModuleWeightCost(
        gather_nbytes=others * own,
        framing_nbytes=others * framing,
        exact_nbytes=others * exact,
        num_gathers=layout.num_gathers if keep == "nothing" else 1,
        kept_nbytes=kept,
        row_framing_nbytes=row_framing,
        buffer_nbytes=message if keep == "codes" else message * (1 + world_size),
    )


def sharing_ranks(topology: Topology, wrapper: Wrapper) -> int:
    """The number of ranks that shard the model together, under FSDP2."""
    return topology.num_parts if wrapper == "hsdp" else topology.world_size


def kept_nbytes(coding: WeightCoding, layouts: Mapping[str, ModuleLayout], topology: Topology, wrapper: Wrapper) -> int:
    """Bytes of memory that stay in use between gathers, for a whole model."""
    num_ranks = sharing_ranks(topology, wrapper)
    return sum(module_weights(coding, module, num_ranks).kept_nbytes for module in layouts.values())


def weight_transfers(
    coding: WeightCoding, layouts: Mapping[str, ModuleLayout], topology: Topology, wrapper: Wrapper
) -> tuple[TransferGroup, ...]:
    """Transfers of a whole model's weights, module by module. With two levels each is first sent between nodes."""
    num_ranks = sharing_ranks(topology, wrapper)
    if num_ranks == 1:
        return ()
    two_level = wrapper == "fsdp" and topology.node_size is not None
    flat: Level = "intra-node" if wrapper == "hsdp" else "flat"
    transfers = []
    for name, module in layouts.items():
        cost = module_weights(coding, module, num_ranks)
        coded, memory, brief = module.has_codes(coding), cost.buffer_nbytes, 0
        row, framing = cost.gather_nbytes // (num_ranks - 1), cost.row_framing_nbytes
        what = "weights" if coded else EXACT_WEIGHTS
        ours = coded or coding.keep == "replica"
        if two_level and ours:
            nodes, inside = topology.num_peers, topology.num_parts
            pieces = pieces_of_rows(row + framing, num_ranks)
            memory += nodes * (row + framing if topology.far else pieces[0][1])
            brief = num_ranks * pieces[0][1]
            far = Message(
                "inter-node",
                what,
                (nodes - 1) * row,
                (nodes - 1) * framing,
                in_series=1 if topology.far else len(pieces),
                fixed=not coding.sends_differences,
            )
            near = replace(
                far,
                level="intra-node",
                in_series=len(pieces),
                nbytes=(inside - 1) * nodes * row,
                framing_nbytes=(inside - 1) * nodes * framing,
                internode_fraction=0.0,
            )
            messages: tuple[Message, ...] = (far, near)
        else:
            ring, direct = ring_internode_fraction(topology), world_internode_fraction(topology)
            internode_fraction = 0.0 if wrapper == "hsdp" else direct if ours else ring
            messages = (
                Message(
                    flat, what, cost.gather_nbytes, (num_ranks - 1) * framing, internode_fraction=internode_fraction
                ),
            )
        numel = sum(spec.numel for spec in module.specs)
        transfers.append(TransferGroup(name, numel, messages, cost.num_gathers, memory, numel if coded else 0, brief))
    return tuple(transfers)
