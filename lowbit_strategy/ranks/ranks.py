"""The ranks that train a model: process groups, communicators, levels and nodes, as one of them sees it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lowbit_strategy.collectives.comm import Comm, GroupComm, LocalComm
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.collectives.transports import FarComm
from lowbit_strategy.ranks.topology import Topology, is_far

_PREFIX = "lowbit_strategy/"
_num_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # by the group they are made from


def new_group(
    members: Sequence[int],
    parent: dist.ProcessGroup | None,
    purpose: str,
    *,
    timeout: timedelta | None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """A group of `members`; call on these ranks only.

    ``torch.distributed.new_group`` names groups by how many a rank has made. If some ranks do not call it, the next
    group of all ranks has two names, and hangs. With ``use_local_synchronization`` it counts a rank's groups, which
    differ as well. So here:

    1. the name says which of the groups this is that `parent`'s ranks have made for `purpose`
    2. torch makes the group under this name, and counts nothing
    3. NCCL does not split the world's communicator, for which all ranks would have to call

    Args:
        members: Global ranks in `parent`, including this one.
        parent: All its ranks make groups now, which are disjoint; None: the default group.
        purpose: The same on all ranks of `parent`.
        timeout: None: torch's default.
        backend: None: that of the default group.
    """
    parent = c10d._get_default_group() if parent is None else parent
    counts = _num_made.setdefault(parent, Counter())
    name = f"{_PREFIX}{parent.group_name}/{purpose}/{counts[purpose]}/{members[0]}"
    counts[purpose] += 1
    with _named(name), _without_splitting():
        made: Any = dist.new_group(list(members), timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, torch gives groups this name; afterwards they do not count in the names of others' groups."""
    stock: Any = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = stock if _is_ours(stock) else functools.partial(_name_of_other, stock)


def _is_ours(name_of: Callable[..., str]) -> bool:
    return isinstance(name_of, functools.partial) and name_of.func is _name_of_other


def _name_of_other(stock: Callable[[list[int]], str], ranks: list[int]) -> str:
    """The name that torch gives, which counts groups, without those of this package."""
    names: Any = c10d._world.pg_names
    own = {group: names.pop(group) for group, name in list(names.items()) if name.startswith(_PREFIX)}
    try:
        return stock(ranks)
    finally:
        names.update(own)


@contextlib.contextmanager
def _without_splitting() -> Iterator[None]:
    """Inside, the default group is bound to no device, so its communicator is not split."""
    default: Any = c10d._get_default_group()
    device: torch.device | None = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that train a model, as one of them sees it.

    Made once, before training. When members change, another one goes to `GradientSync.renew` between two steps, so
    others read ``sync.ranks`` whenever they need a group. Two have a communicator of their own, which is then made
    again: `ParameterDigest` and the `Gathering` of weights.

    Args:
        world: All ranks that train the model, for agreements between steps; nothing else may use its group while
            buckets are in flight on CPU. With replicas that come and go: the ranks of this one's replica.
        peers: The ranks that reduce the same part of every parameter as this one, with compressed messages. With one
            level these are all ranks; with two they are on different nodes; under HSDP they have the same shard.
        intra_node: The ranks of one node that together reduce whole parameters, each a part. None: there is one level.
        intra: Bits of the codes that they send each other. None: their sums are exact.
        node_sizes: As in `Topology`.
        own: Groups that were made for this value, which `destroy` ends.
        comes_and_goes: `world` is one of the replicas that come and go, and `peers` has one rank of each.

    Attributes:
        rank: Of this rank among all, replica by replica.
        world_size: Of all ranks.
        topology: They as numbers.
        alone: Nothing is compressed, because no other rank reduces the same parts or ever will.
    """

    world: Comm
    peers: Comm
    intra_node: Comm | None = None
    node_sizes: tuple[int, ...] | None = None
    own: tuple[dist.ProcessGroup, ...] = ()
    comes_and_goes: bool = False
    intra: int | None = None
    rank: int = field(init=False, compare=False)
    world_size: int = field(init=False, compare=False)
    topology: Topology = field(init=False, compare=False)
    alone: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        peers, rank, world_size = self.peers, self.world.rank, self.world.world_size
        if self.comes_and_goes:
            rank, world_size = peers.rank * world_size + rank, peers.world_size * world_size
        node_size = None if self.intra_node is None else self.intra_node.world_size
        topology = Topology(world_size, self.node_sizes, rank, node_size, peers.is_far, self.intra)
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "world_size", world_size)
        object.__setattr__(self, "topology", topology)
        object.__setattr__(self, "alone", peers.world_size == 1 and not self.comes_and_goes)

    @classmethod
    def flat(cls, comm: Comm) -> Ranks:
        """One level: all ranks of `comm` reduce whole parameters with each other."""
        return cls(comm, comm)

    def coming_and_going(self) -> Ranks:
        """These ranks as a replica that has not met others yet."""
        return replace(self, peers=LocalComm(), node_sizes=None, comes_and_goes=True)

    def gathering(self, *, sharded_inside: bool) -> Gathering:
        """The gathering of weights, with its own byte counter: to each other node once.

        Args:
            sharded_inside: The ranks of a node shard one model (HSDP); otherwise all ranks do.
        """
        if self.intra_node is None:
            return Gathering(self.world.with_own_counter())
        inside = self.intra_node.with_own_counter()
        return Gathering(inside) if sharded_inside else Gathering(self.peers.with_own_counter(), inside)

    def destroy(self) -> None:
        """End the groups that were made for this value."""
        for group in self.own:
            with contextlib.suppress(ValueError):  # the framework has destroyed all groups already
                dist.destroy_process_group(group)
        for comm in (self.world, self.peers, self.intra_node):
            if comm is not None:
                comm.release(self.own)


def make_ranks(
    group: dist.ProcessGroup | None,
    topology: Topology,
    size: int | None,
    device: torch.device,
    *,
    own_world: bool = False,
    far: bool | None = None,
    intra: int | None = None,
) -> Ranks:
    """Groups of `size` consecutive ranks, and groups of those with equal index in theirs; call on all ranks of `group`.

    Args:
        group: All ranks.
        topology: Their nodes.
        size: Ranks that together reduce whole parameters; None: each reduces whole parameters with all others.
        device: Of gradients.
        own_world: Make a group of all ranks, too, because another thread uses `group`.
        far: Whether peers are far apart, on CPU; None: measure it.
        intra: As in `Ranks`.
    """
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank, backend = dist.get_rank(group), (group or c10d._get_default_group())._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)  # some backends have none
    if device.type != "cpu" or backend.name() != "gloo" or len(members) == 1:
        far = False
    elif far is None:
        far = topology.num_nodes != 1 and is_far(group)
    far_world = far and size is None
    own_world |= far_world
    own = [_connected(new_group(members, group, "world", timeout=timeout), device)] if own_world else []
    world = _comm(own[0] if own_world else group, range(len(members)), topology, rank, far=far_world)
    if device.type != "cpu":
        _connected(group, device)  # FSDP2 has not used it yet if the model is on the meta device
    if size is None:
        return Ranks(world, world, node_sizes=topology.node_sizes, own=tuple(own))
    index = rank % size
    intra_node = new_group(members[rank - index : rank - index + size], group, "node", timeout=timeout)
    peers = new_group(members[index::size], group, "peers", timeout=timeout)
    for made in (intra_node, peers):
        _connected(made, device)
    return Ranks(
        world=world,
        peers=_comm(peers, range(index, len(members), size), topology, rank, far=far),
        intra_node=_comm(intra_node, range(rank - index, rank - index + size), topology, rank),
        node_sizes=topology.node_sizes,
        own=(*own, intra_node, peers),
        intra=intra,
    )


def _connected(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """`group`, once all its ranks are connected.

    On CPU a rank that fails right afterwards would break the others' connecting, and their error would hide its own.
    NCCL connects at a group's first collective, and separately for all-to-all: inside a step several groups would do so
    at the same time, in an order that differs between ranks.
    """
    if device.type == "cpu":
        dist.barrier(group)
    else:
        number_W = torch.zeros(dist.get_world_size(group), device=device)
        dist.all_reduce(number_W, group=group)
        dist.all_to_all_single(torch.empty_like(number_W), number_W, group=group)
        number_W.cpu()
    return group


def _comm(
    group: dist.ProcessGroup | None, members: Collection[int], topology: Topology, rank: int, *, far: bool = False
) -> GroupComm:
    comm = GroupComm(group)
    if far:
        assert group is not None
        comm = FarComm(group)
    comm.num_near = topology.num_near(members, rank)
    return comm
