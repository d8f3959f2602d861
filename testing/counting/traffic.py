"""Bytes handed to `torch.distributed`, counted where it is called and not where the package counts them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import GroupComm


class Traffic:
    """What this rank hands to others, and how often it calls each collective, from any of its threads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.calls[name] += 1


@contextlib.contextmanager
def count_traffic(traffic: Traffic | None = None) -> Iterator[Traffic]:
    """Count every collective of this process while it lasts, broadcasts and point-to-point messages included.

    An all-reduce counts as a ring, twice (W - 1) / W of the tensor; what a rank keeps for itself does not count.
    """
    traffic = traffic if traffic is not None else Traffic()
    with contextlib.ExitStack() as stack:
        for name, nbytes in _SENT.items():
            stack.enter_context(mock.patch.object(dist, name, _counted(name, nbytes, traffic)))
        for name in _REFUSED:
            stack.enter_context(mock.patch.object(dist, name, _refuse(name)))
        yield traffic


def _counted(name: str, nbytes: Callable[..., int], traffic: Traffic) -> Callable[..., Any]:
    original = getattr(dist, name)

    def call(*args: Any, **options: Any) -> Any:
        traffic.add(name, nbytes(*args, **options))
        return original(*args, **options)

    return call


def _refuse(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise AssertionError(f"dist.{name} is not counted: add it to testing/counting/traffic.py")

    return call


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> int:
    kept = input.shape[0] // dist.get_world_size(group)
    if input_split_sizes:
        kept = input_split_sizes[dist.get_rank(group)]
    per_row = input.numel() // input.shape[0] if input.shape[0] else 0
    return (input.numel() - kept * per_row) * input.element_size()


def _all_gather_into_tensor(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> int:
    return input.nbytes * (dist.get_world_size(group) - 1)


def _all_gather(
    outputs: list[Tensor], input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> int:
    return input.nbytes * (dist.get_world_size(group) - 1)


def _all_reduce(tensor: Tensor, op: Any = None, group: dist.ProcessGroup | None = None, async_op: bool = False) -> int:
    world_size = dist.get_world_size(group)
    return 2 * (world_size - 1) * tensor.nbytes // world_size


def _broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> int:
    is_source = dist.get_rank(group) == group_src if group_src is not None else dist.get_rank() == src
    return tensor.nbytes * (dist.get_world_size(group) - 1) if is_source else 0


def _point_to_point(tensor: Tensor, *args: Any, **options: Any) -> int:
    return tensor.nbytes


def _batch(operations: list[dist.P2POp]) -> int:
    return sum(operation.tensor.nbytes for operation in operations if operation.op in (dist.isend, dist.send))


_SENT: dict[str, Callable[..., int]] = {
    "all_to_all_single": _all_to_all_single,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "send": _point_to_point,
    "isend": _point_to_point,
    "batch_isend_irecv": _batch,
}
_REFUSED = ("reduce_scatter_tensor", "reduce_scatter", "all_to_all", "gather", "scatter", "reduce")


@contextlib.contextmanager
def count_exchanges() -> Iterator[list[int]]:
    """The sizes of the compressed messages that this rank sends, one entry an exchange."""
    sizes: list[int] = []
    original = GroupComm.all_to_all

    def counted(self: GroupComm, out_WB: Tensor, x_WB: Tensor) -> Any:
        sizes.append(x_WB.numel())
        return original(self, out_WB, x_WB)

    with mock.patch.object(GroupComm, "all_to_all", counted):
        yield sizes
