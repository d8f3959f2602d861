"""Makes process groups of some ranks, and connects them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_PREFIX = "lowbit_strategy/"
_num_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # by parent group
_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()  # by default group


def new_group(
    members: Sequence[int],
    parent: dist.ProcessGroup | None,
    purpose: str,
    *,
    timeout: timedelta | None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a group of `members`. Call it on these ranks only.

    ``torch.distributed.new_group`` names a group by the number of groups that a rank has made. If some ranks do not
    call it, the next group of all ranks has two names and hangs. With ``use_local_synchronization`` it counts a rank's
    groups, which also differ. Therefore:

    1. the name counts the groups that `parent`'s ranks have made for `purpose`
    2. torch makes the group under this name, and its counters are restored
    3. NCCL does not split the world's communicator, which would need a call on all ranks

    Args:
        members: Global ranks in `parent`, including this one.
        parent: All its ranks make disjoint groups now; None: the default group.
        purpose: A word that is the same on all ranks of `parent`.
        timeout: None: torch's default.
        backend: None: the default group's backend.
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
    """A context in which torch gives groups this name. They do not count in the names of later groups.

    torch names groups by a counter, by a rank's number of groups (before 2.14), or by both.
    """
    stock: Any = c10d._hash_ranks_to_str
    world: Any = c10d._world
    count = world.group_count
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        world.group_count = count
        c10d._hash_ranks_to_str = stock if _is_ours(stock) else functools.partial(_name_of_other, stock)


def _is_ours(name_of: Callable[..., str]) -> bool:
    return isinstance(name_of, functools.partial) and name_of.func is _name_of_other


def _name_of_other(stock: Callable[[list[int]], str], ranks: list[int]) -> str:
    """The name that torch would give if this package had made no groups."""
    names: Any = c10d._world.pg_names
    own = {group: names.pop(group) for group, name in list(names.items()) if name.startswith(_PREFIX)}
    try:
        return stock(ranks)
    finally:
        names.update(own)


@contextlib.contextmanager
def _without_splitting() -> Iterator[None]:
    """A context in which the default group is not bound to a device, so that its communicator is not split."""
    default: Any = c10d._get_default_group()
    device: torch.device | None = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """The timeout of `group`; None: it has none."""
    backend: Any = (group or c10d._get_default_group())._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout


def connected(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Return `group` once all its ranks are connected.

    On CPU, a rank that fails right after creation would break the others' connections, and their errors would hide its
    own. NCCL connects at a group's first collective, and separately for all-to-all; inside a step, several groups would
    do so simultaneously, in an order that differs between ranks.
    """
    if device.type == "cpu":
        dist.barrier(group)
    else:
        number_W = torch.zeros(dist.get_world_size(group), device=device)
        dist.all_reduce(number_W, group=group)
        dist.all_to_all_single(torch.empty_like(number_W), number_W, group=group)
        number_W.cpu()
    return group


def group_with(ranks: Sequence[int], near: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """The group of these ranks, made once per run. Call it on all of them.

    Args:
        ranks: Global ranks, in order.
        near: An existing group, returned if it has these ranks; a new group gets its timeout.
        device: Device of its tensors.
    """
    if len(ranks) == dist.get_world_size():
        return None
    if list(ranks) == dist.get_process_group_ranks(near):
        return near
    made = _made.setdefault(c10d._get_default_group(), {})
    if (key := tuple(ranks)) not in made:
        purpose = f"model/{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}"
        made[key] = connected(new_group(ranks, None, purpose, timeout=timeout_of(near, device)), device)
    return made[key]
