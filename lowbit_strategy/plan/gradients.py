"""The messages of gradients: of a bucket between the ranks that reduce it, and inside nodes around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from lowbit_strategy.codecs.packed import PART_NUMEL
from lowbit_strategy.collectives.exchange import HEADER_NBYTES
from lowbit_strategy.collectives.layout import ALIGNMENT, dim0_cut, round_up
from lowbit_strategy.collectives.ordered import MESSAGE_NBYTES, pieces_of_rows
from lowbit_strategy.methods._base.method import CodecPair, Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.plan.messages import Level, Message, TransferGroup
from lowbit_strategy.ranks.topology import Topology

Layout = Literal["ddp", "fsdp", "hsdp"]

_WORKING_NBYTES = 32  # of temporary memory per element that plain PyTorch codes at a time, measured: benchmarks/LOG.md
DDP_FIRST_NBYTES, DDP_CAP_NBYTES = 2**20, 25 * 2**20  # of a bucket, as DDP has them by default
# Of those that are compressed. On gloo several smaller buckets fill a slow link better than DDP's: their exchanges
# overlap each other and backward; measured from 2 to 25 at 200 Mbit/s and 1 Gbit/s: docs/benchmarks.md. On CUDA, and
# on any other accelerator, each bucket costs a fixed time on the host, so there are fewer and larger ones.
BUCKET_CAP_MB = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that are reduced as one.

    Args:
        names: Of the parameters.
        itemsize: Bytes of an element of their gradients.
        name: For reports.
    """

    names: tuple[str, ...]
    itemsize: int = 4
    name: str = ""


def ddp_buckets(params: Iterable[tuple[str, int, int]], cap_nbytes: int = DDP_CAP_NBYTES) -> list[ParamGroup]:
    """How DDP puts gradients together, once it has seen in which order they come.

    Args:
        params: Name, elements and bytes of an element, in the model's order. The last comes first in backward.
        cap_nbytes: Of all buckets but the first.
    """
    found: list[tuple[list[str], int]] = []
    nbytes = 0
    for name, numel, itemsize in reversed(list(params)):
        full = min(DDP_FIRST_NBYTES, cap_nbytes) if len(found) == 1 else cap_nbytes
        if not found or itemsize != found[-1][1] or nbytes >= full:
            found.append(([], itemsize))
            nbytes = 0
        found[-1][0].append(name)
        nbytes += numel * itemsize
    return [ParamGroup(tuple(names), size, f"bucket {at}") for at, (names, size) in enumerate(found)]


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """Who reduces what, and how.

    Args:
        methods: Of each parameter.
        specs: Of each parameter, or of this rank's part of it.
        topology: The ranks.
    """

    methods: Mapping[str, Method]
    specs: Mapping[str, TensorSpec]
    topology: Topology

    @property
    def _is_sharded(self) -> bool:
        """As all parameters are, or none."""
        return any(spec.sharded for spec in islice(self.specs.values(), 1))

    def _coded_rows(self, names: Iterable[str]) -> list[tuple[CodecPair, int]]:
        """The codecs of the parameters that have any, and the elements of a rank's row."""
        return [
            (pair, self.specs[name].cut(self.topology.num_peers, pair.block_size).row_numel)
            for name in names
            if isinstance(pair := self.methods[name], CodecPair)
        ]

    def messages(self, names: Sequence[str]) -> list[Message]:
        """What a rank sends for one bucket to the ranks that reduce it.

        1. all codecs together: one message on the uplink and, in an all-reduce, one on the downlink
        2. every other method after them, one after the other
        """
        peers = self.topology.num_peers
        if peers == 1:
            return []
        others, level = peers - 1, peer_level(self.topology)
        internode_fraction = self.topology.peers_internode_fraction()
        messages: list[Message] = []
        rows = self._coded_rows(names)
        for hop in ("uplink",) if self._is_sharded else ("uplink", "downlink"):
            sizes = [getattr(pair, hop).wire_nbytes(row_numel) for pair, row_numel in rows]
            if sizes:
                promised = sum(sizes)
                framed = HEADER_NBYTES + sum(round_up(size, ALIGNMENT) for size in sizes)
                messages.append(
                    Message(
                        level,
                        hop,
                        others * promised,
                        others * (framed - promised),
                        internode_fraction=internode_fraction,
                    )
                )
        for method, members in self._reduced(names).items():
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
        """The same for parameters that send the same."""
        return tuple((id(self.methods[name]), self.specs[name].shape, id(self.specs[name].part)) for name in names)

    def _reduced(self, names: Iterable[str]) -> dict[Reducer, list[TensorSpec]]:
        """The parameters of each `Reducer`."""
        reduced: dict[Reducer, list[TensorSpec]] = {}
        for name in names:
            if isinstance(method := self.methods[name], Reducer):
                reduced.setdefault(method, []).append(self.specs[name])
        return reduced

    def padding_nbytes(self, names: Sequence[str]) -> int:
        """What methods with communication of their own may send beyond their promises: two hops, padded for each."""
        return 2 * (self.topology.num_peers - 1) * ALIGNMENT * sum(map(len, self._reduced(names).values()))

    def memory(self, names: Sequence[str]) -> tuple[int, int]:
        """Memory that the shared exchange of a bucket takes: while it is under way, and for the mean between hops."""
        peers, rows = self.topology.num_peers, self._coded_rows(names)
        if not rows:
            return 0, 0
        row = HEADER_NBYTES + sum(round_up(pair.uplink.wire_nbytes(row_numel), ALIGNMENT) for pair, row_numel in rows)
        shard = sum(round_up(row_numel, ALIGNMENT) for _, row_numel in rows)
        own = 0 if self._is_sharded or peers <= 2 else row  # of two ranks it lies where the first message was
        return 2 * peers * row + own, 0 if self._is_sharded else 4 * shard

    def working_nbytes(self, max_in_flight: Iterable[Sequence[str]], device_type: str) -> int:
        """Temporary memory for what no kernel codes.

        Codecs: plain PyTorch codes a run of elements at a time. Methods with communication of their own: what they
        need for the elements that they reduce at once.
        """
        run = PART_NUMEL[device_type == "cuda"]
        longest = 0
        for pair, row_numel in self._coded_rows(self.methods):
            if not (pair.uplink.in_one_pass and (self._is_sharded or pair.downlink.in_one_pass)):
                longest = max(longest, row_numel, min(run, self.topology.num_peers * row_numel))
        return longest * _WORKING_NBYTES + max(
            (round(self._reducing_nbytes(names)) for names in max_in_flight), default=0
        )

    def _reducing_nbytes(self, names: Sequence[str]) -> float:
        copied = 4 if self._is_sharded else 0  # rows of several ranks are put together first
        return max(
            (
                sum((method.temporary_nbytes + copied) * spec.numel for spec in members)
                for method, members in self._reduced(names).items()
                if method.temporary_nbytes
            ),
            default=0.0,
        )


def summed(what: str, numel: int, topology: Topology) -> Message:
    """An uncompressed float32 all-reduce of `numel` elements over the peers, which no method accounts for."""
    nbytes = 2 * (topology.num_peers - 1) * 4 * numel // topology.num_peers
    return Message(peer_level(topology), what, 0, nbytes, internode_fraction=topology.peers_internode_fraction())


def peer_level(topology: Topology) -> Level:
    """Of messages between the ranks that reduce one part."""
    return "flat" if topology.node_size is None else "inter-node"


def peer_transfer(
    name: str, bucket: Sequence[TensorSpec], methods: Mapping[str, Method], topology: Topology
) -> TransferGroup:
    """What a rank sends for its parts of parameters that are no gradients of a step."""
    specs = {spec.name: spec for spec in bucket if spec.numel}
    reduction, names = ReductionPlan(methods, specs, topology), list(specs)
    messages = reduction.messages(names)
    memory, mean = reduction.memory(names)
    numel, encoded = sum(spec.whole_numel for spec in bucket), 2 * sum(spec.numel for spec in bucket)
    return TransferGroup(name, numel, tuple(messages), 1, memory, encoded, mean)


def _part_numel(spec: TensorSpec, topology: Topology) -> int:
    """Elements of the largest part of a parameter, padding included: what is sent to each rank of a node."""
    part = replace(topology, rank=0).own_part(spec.whole, sharded=spec.sharded).part
    assert part is not None
    return part.ranges[0][1] if part.row_numel is None else topology.num_peers * part.row_numel


def intra_node_numel(specs: Mapping[str, TensorSpec], names: Sequence[str], topology: Topology, layout: Layout) -> int:
    """Elements that this rank sends to each other rank of its node in an exact reduce-scatter of a bucket."""
    if layout == "hsdp":
        return sum(dim0_cut(specs[name].whole.shape, topology.num_parts).row_numel for name in names)
    return sum(_part_numel(specs[name], topology) for name in names)


def intra_node_memory(numel: int, itemsize: int, topology: Topology, layout: Layout) -> tuple[int, int]:
    """Memory for the exact sums inside a node: for the mean, as long as the bucket is under way, and for a piece that
    is sent and one that is received, of one bucket at a time, but under DDP of each.

    Args:
        numel: Elements of the mean.
        itemsize: Of an element.
        topology: The ranks.
        layout: What wraps the model.
    """
    whole = topology.num_parts * numel * itemsize
    piece = min(whole, MESSAGE_NBYTES)
    pieces = piece if piece == whole else 2 * piece  # what is sent as one the framework has as well, or gloo for it
    mean = whole // topology.num_parts
    if layout == "ddp":
        return pieces + mean + whole, 0
    return 0 if layout == "hsdp" else mean, pieces  # under HSDP FSDP2 has the mean


def intra_node_copied(numel: int, itemsize: int, topology: Topology, layout: Layout) -> int:
    """Bytes read and written for the exact sums inside a node: rows are put together and added; DDP's bucket is filled
    with what comes back. HSDP's sums are FSDP2's own, and part of its step.
    """
    whole = topology.num_parts * numel * itemsize
    added = whole + numel * itemsize
    return {"ddp": 4 * whole + added, "fsdp": 2 * whole + added, "hsdp": 0}[layout]


def _gradient_transfer(
    reduced: ParamGroup, reduction: ReductionPlan, layout: Layout, *, whole_model: Sequence[str], local: bool
) -> TransferGroup:
    """Of parameters that are reduced as one.

    `whole_model`: in DDP's last bucket, parameters of other buckets that are reduced with it. `local`: steps are, so
    that nothing travels to peers.
    """
    methods, specs, topology = reduction.methods, reduction.specs, reduction.topology
    present = [name for name in reduced.names if layout == "fsdp" or specs[name].numel]  # a rank may have no part of it
    own = [name for name in present if not (methods[name].whole_model and layout == "ddp")] + list(whole_model)
    messages: list[Message] = []
    memory = brief = copied = 0
    if topology.num_parts > 1 and not (local and layout == "ddp"):
        numel = intra_node_numel(specs, reduced.names, topology, layout)
        sent = (topology.num_parts - 1) * numel * reduced.itemsize
        pieces = len(pieces_of_rows(numel, topology.num_parts * reduced.itemsize))
        messages.append(Message("intra-node", "reduce-scatter", sent, in_series=pieces, internode_fraction=0.0))
        memory, brief = intra_node_memory(numel, reduced.itemsize, topology, layout)
        copied = intra_node_copied(numel, reduced.itemsize, topology, layout)
    if not local:
        messages += reduction.messages(own)
        traveling, mean = reduction.memory(present)
        memory += traveling
        brief += mean
    if messages and messages[0].level == "intra-node" and layout == "ddp":
        messages.append(replace(messages[0], what="all-gather"))
    hops = 1 if layout == "fsdp" else 2
    return TransferGroup(
        reduced.name,
        sum(specs[name].whole_numel for name in reduced.names),
        tuple(messages),
        buffer_nbytes=memory,
        encoded_numel=0 if local else hops * sum(specs[name].numel for name in own),
        copied_nbytes=copied,
        brief_nbytes=brief,
    )


def gradient_transfers(
    reduced: Sequence[ParamGroup], reduction: ReductionPlan, layout: Layout, *, local: bool
) -> tuple[TransferGroup, ...]:
    """Of a whole model, in the order in which backward comes to them."""
    methods, specs = reduction.methods, reduction.specs
    waiting = [name for each in reduced for name in each.names if methods[name].whole_model and specs[name].numel]
    last = len(reduced) - 1 if layout == "ddp" else None  # where they are reduced
    known: dict[object, TransferGroup] = {}  # the layers of a model are alike
    transfers = []
    for at, each in enumerate(reduced):
        whole_model = waiting if at == last else ()
        kind = reduction.kind_of(each.names), each.itemsize, bool(whole_model)
        if kind not in known:
            known[kind] = _gradient_transfer(each, reduction, layout, whole_model=whole_model, local=local)
        transfers.append(replace(known[kind], name=each.name))
    return tuple(transfers)
