"""The messages of gradients: inside nodes, and of a bucket between the ranks that reduce it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.exchange import marks_nbytes, message_nbytes
from lowbit_strategy.collectives.layout import ALIGNMENT, TensorSpec, dim0_row_numel, round_up
from lowbit_strategy.collectives.ordered import MESSAGE_NBYTES, pieces_of_rows
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.plan.levels import peer_level, peers_internode_fraction
from lowbit_strategy.plan.messages import Message, TransferGroup
from lowbit_strategy.plan.reduced import ParamGroup
from lowbit_strategy.ranks.topology import Topology


def node_transfer(
    specs: Mapping[str, TensorSpec],
    names: Sequence[str],
    itemsize: int,
    topology: Topology,
    wrapper: Wrapper,
    exact: Collection[str],
) -> TransferGroup:
    """Transfers of one bucket inside a node: its sums, and under DDP the gather of its parts.

    Args:
        specs: Specs of all parameters.
        names: Names of the bucket's parameters.
        itemsize: Bytes per gradient element.
        topology: The ranks.
        wrapper: What wraps the model.
        exact: Parameters whose sums are exact even if those of others are coded.
    """
    num_inside, rows = topology.num_parts, {name: node_rows(specs[name], topology, wrapper) for name in names}
    numel = sum(map(math.prod, rows.values()))
    whole, mean = num_inside * numel * itemsize, numel * itemsize
    in_series = len(pieces_of_rows(numel, num_inside * itemsize))
    sums = Message("intra-node", "reduce-scatter", whole - mean, in_series=in_series, internode_fraction=0.0)
    gather = (replace(sums, what="all-gather"),) if wrapper == "ddp" else ()
    encoded = 0
    if topology.coding is None:
        piece = min(whole, MESSAGE_NBYTES)
        messages = piece if piece == whole else 2 * piece  # the framework, or gloo, also holds an unsplit message
    else:
        row_nbytes = message_nbytes(
            topology.coding.codec(exact=name in exact).wire_nbytes(row_numel)
            for name, (num_rows, row_numel) in rows.items()
            for _ in range(num_rows)
        )
        sums = replace(sums, nbytes=(num_inside - 1) * row_nbytes, in_series=1)
        messages, encoded = 2 * num_inside * row_nbytes, num_inside * numel
    kept = {"ddp": messages + mean + whole, "fsdp": mean, "hsdp": 0}[wrapper]  # under HSDP FSDP2 holds the mean
    brief = 0 if wrapper == "ddp" else messages
    return TransferGroup("", numel, (sums, *gather), 1, kept, encoded, brief)


def node_rows(spec: TensorSpec, topology: Topology, wrapper: Wrapper) -> tuple[int, int]:
    """The number of rows that a rank has of one parameter for each rank of its node, and the elements of each row."""
    if wrapper == "hsdp":
        return 1, dim0_row_numel(spec.whole.shape, topology.num_parts)
    (part,) = replace(topology, rank=0).own_parts([spec.whole], sharded=spec.sharded)
    return (1, part.ranges[0][1]) if part.part_row_numel is None else (topology.num_peers, part.part_row_numel)


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """The ranks and methods that reduce parameters.

    Args:
        methods: Method of each parameter.
        specs: Spec of each parameter, or of this rank's part of it.
        topology: The ranks.
        exact: Parameters whose sums inside a node are exact even if those of others are coded.
    """

    methods: Mapping[str, Method]
    specs: Mapping[str, TensorSpec]
    topology: Topology
    exact: frozenset[str] = frozenset()

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded; either all are or none is."""
        return any(spec.sharded for spec in islice(self.specs.values(), 1))

    def coded_rows(self, names: Iterable[str]) -> list[tuple[CodecPair, int]]:
        """The codecs of the parameters that have codecs, and the elements of a rank's row."""
        return [
            (pair, self.specs[name].row_numel(self.topology.num_peers, pair.block_size))
            for name in names
            if isinstance(pair := self.methods[name], CodecPair)
        ]

    def messages(self, names: Sequence[str], num_marked: int = 0) -> list[Message]:
        """The messages that a rank sends for one bucket to the ranks that reduce it.

        1. all codecs share one message on the uplink and, in an all-reduce, one on the downlink. The uplink has the
           marks, even if it has nothing else
        2. the other methods follow, one after the other

        `num_marked`: see `BucketLayout`.
        """
        peers = self.topology.num_peers
        if peers == 1:
            return []
        others, level = peers - 1, peer_level(self.topology)
        internode_fraction = peers_internode_fraction(self.topology)
        messages: list[Message] = []
        rows = self.coded_rows(names)
        for hop in ("uplink",) if self.is_sharded else ("uplink", "downlink"):
            sizes = [getattr(pair, hop).wire_nbytes(row_numel) for pair, row_numel in rows]
            marks = num_marked if hop == "uplink" else 0
            if sizes or marks:
                promised = sum(sizes)
                framed = message_nbytes(sizes, marks)
                messages.append(
                    Message(
                        level,
                        hop,
                        others * promised,
                        others * (framed - promised),
                        internode_fraction=internode_fraction,
                    )
                )
        for method, members in self.reduced(names).items():
            messages.append(
                Message(
                    level,
                    method.label,
                    sum(method.wire_nbytes(spec, peers) for spec in members),
                    in_series=method.num_messages(members, peers),
                    fixed=method.fixed_size,
                    internode_fraction=internode_fraction,
                )
            )
        return messages

    def kind_of(self, names: Iterable[str]) -> object:
        """A key that is equal for parameters that send equal messages."""
        return tuple(
            (id(self.methods[name]), self.specs[name].shape, self.specs[name].ranges, name in self.exact)
            for name in names
        )

    def reduced(self, names: Iterable[str]) -> dict[Reducer, list[TensorSpec]]:
        """The parameters of each `Reducer`."""
        reduced: dict[Reducer, list[TensorSpec]] = {}
        for name in names:
            if isinstance(method := self.methods[name], Reducer):
                reduced.setdefault(method, []).append(self.specs[name])
        return reduced

    def padding_nbytes(self, names: Sequence[str]) -> int:
        """Bytes that `Reducer`s may send beyond their promises: padding on two hops for each parameter."""
        return 2 * (self.topology.num_peers - 1) * ALIGNMENT * sum(map(len, self.reduced(names).values()))

    def memory(self, names: Sequence[str], num_marked: int = 0) -> tuple[int, int]:
        """Memory for the shared exchange of a bucket: while it is under way, and for the mean between hops."""
        peers, rows = self.topology.num_peers, self.coded_rows(names)
        if not (rows or num_marked):
            return 0, 0
        row = message_nbytes((pair.uplink.wire_nbytes(row_numel) for pair, row_numel in rows), num_marked)
        shard = sum(round_up(row_numel, ALIGNMENT) for _, row_numel in rows)
        own = 0 if self.is_sharded or peers <= 2 else row  # with two ranks it reuses the first message's memory
        return 2 * peers * row + own, 0 if self.is_sharded else 4 * shard


def summed(what: str, numel: int, topology: Topology) -> Message:
    """The message of an uncompressed float32 all-reduce of `numel` elements over the peers, outside any method."""
    nbytes = 2 * (topology.num_peers - 1) * 4 * numel // topology.num_peers
    return Message(peer_level(topology), what, 0, nbytes, internode_fraction=peers_internode_fraction(topology))


def peer_transfer(
    name: str, bucket: Sequence[TensorSpec], methods: Mapping[str, Method], topology: Topology
) -> TransferGroup:
    """The transfer for a rank's parts of parameters that are not a step's gradients."""
    specs = {spec.name: spec for spec in bucket if spec.numel}
    reduction, names = ReductionPlan(methods, specs, topology), list(specs)
    messages = reduction.messages(names)
    memory, mean = reduction.memory(names)
    numel, encoded = sum(spec.whole_numel for spec in bucket), 2 * sum(spec.numel for spec in bucket)
    return TransferGroup(name, numel, tuple(messages), 1, memory, encoded, mean)


def _gradient_transfer(
    reduced: ParamGroup, reduction: ReductionPlan, wrapper: Wrapper, *, whole_model: Sequence[str], local: bool
) -> TransferGroup:
    """Transfers of parameters that are reduced together.

    `whole_model`: parameters of other buckets that DDP's last bucket also reduces. `local`: steps are local, so nothing
        is sent to peers.
    """
    methods, specs, topology = reduction.methods, reduction.specs, reduction.topology
    # A rank may have no part of a parameter.
    present = [name for name in reduced.names if wrapper == "fsdp" or specs[name].numel]
    own = [name for name in present if not (methods[name].whole_model and wrapper == "ddp")] + list(whole_model)
    inside = TransferGroup(reduced.name, 0, ())
    if topology.num_parts > 1 and not (local and wrapper == "ddp"):
        inside = node_transfer(specs, reduced.names, reduced.itemsize, topology, wrapper, reduction.exact)
    between: list[Message] = []
    memory, brief, encoded = inside.buffer_nbytes, inside.brief_nbytes, inside.encoded_numel
    if not local:
        num_marked = 0 if wrapper == "ddp" else len(reduced.names)
        between = reduction.messages(own, num_marked)
        traveling, mean = reduction.memory(present, num_marked)
        memory += traveling
        brief += mean
        encoded += (1 if wrapper == "fsdp" else 2) * sum(specs[name].numel for name in own)
    return TransferGroup(
        reduced.name,
        sum(specs[name].whole_numel for name in reduced.names),
        (*inside.messages[:1], *between, *inside.messages[1:]),
        buffer_nbytes=memory,
        encoded_numel=encoded,
        brief_nbytes=brief,
    )


def gradient_transfers(
    reduced: Sequence[ParamGroup], reduction: ReductionPlan, wrapper: Wrapper, *, local: bool
) -> tuple[TransferGroup, ...]:
    """Transfers of a whole model, in the order of the backward pass."""
    methods, specs = reduction.methods, reduction.specs
    waiting = [name for each in reduced for name in each.names if methods[name].whole_model and specs[name].numel]
    last = len(reduced) - 1 if wrapper == "ddp" else None  # the bucket that reduces them
    known: dict[object, TransferGroup] = {}  # a model's layers are equal
    transfers = []
    for at, each in enumerate(reduced):
        whole_model = waiting if at == last else ()
        kind = reduction.kind_of(each.names), each.itemsize, bool(whole_model)
        if kind not in known:
            known[kind] = _gradient_transfer(each, reduction, wrapper, whole_model=whole_model, local=local)
        transfers.append(replace(known[kind], name=each.name))
    num_inside = reduction.topology.num_parts
    if wrapper != "ddp" and num_inside > 1 and transfers:  # one message for all, at the end of a backward pass
        nbytes = (num_inside - 1) * sum(marks_nbytes(len(each.names)) for each in reduced)
        marks = Message("intra-node", "marks", nbytes, internode_fraction=0.0)
        transfers[-1] = replace(transfers[-1], messages=(*transfers[-1].messages, marks))
    return tuple(transfers)
