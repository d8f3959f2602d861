"""Finds which parameters are reduced together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DDP_FIRST_NBYTES, DDP_CAP_NBYTES = 2**20, 25 * 2**20  # DDP's default bucket sizes


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that are reduced together.

    Args:
        names: Names of the parameters.
        itemsize: Bytes of an element of their gradients.
        name: Its name in reports.
    """

    names: tuple[str, ...]
    itemsize: int = 4
    name: str = ""


def ddp_buckets(params: Iterable[tuple[str, int, int]], cap_nbytes: int = DDP_CAP_NBYTES) -> list[ParamGroup]:
    """The buckets in which DDP collects gradients once it knows their order.

    Args:
        params: Name, number of elements and bytes per element, in the model's order. The last comes first in backward.
        cap_nbytes: Size of all buckets except the first.
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
