"""Which parameters are reduced, or gathered, as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding

Layout = Literal["ddp", "fsdp", "hsdp"]  # what wraps the model
DDP_FIRST_NBYTES, DDP_CAP_NBYTES = 2**20, 25 * 2**20  # of a bucket, as DDP has them by default


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that are reduced as one.

    Args:
        names: Names of the parameters.
        itemsize: Bytes of an element of their gradients.
        name: What reports call it.
    """

    names: tuple[str, ...]
    itemsize: int = 4
    name: str = ""


def ddp_buckets(params: Iterable[tuple[str, int, int]], cap_nbytes: int = DDP_CAP_NBYTES) -> list[ParamGroup]:
    """How DDP puts gradients together, once it has seen in which order they come.

    Args:
        params: Name, elements and bytes of an element, in the model's order. The last comes first in backward.
        cap_nbytes: Size of all buckets but the first.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleLayout:
    """What one sharded module gathers as one.

    Args:
        specs: Its parameters, in the order in which their shards follow each other in a row.
        dtype: Type of the gathered weights.
        num_gathers: How often FSDP2 gathers them in a step of one forward and one backward pass.
        coded: Whether they can be coded; no where a parameter has another type than floats, or gathers in a way of its
            own.
    """

    specs: tuple[TensorSpec, ...]
    dtype: torch.dtype
    num_gathers: int
    coded: bool = True


def has_codes(coding: WeightCoding, layout: ModuleLayout) -> bool:
    """Whether a module's weights travel as codes; FSDP2's own gathers, or rows as they are, otherwise."""
    return layout.coded and not isinstance(coding, Exact)
