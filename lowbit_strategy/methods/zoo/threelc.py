"""3LC: three values, five to a byte, with run-length coding of zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending, gather_uneven, scatter_uneven
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor, ReducingCompressor
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse_residuals import Condition, accumulate_
from lowbit_strategy.methods.zoo.integers import pack_integers, packed_nbytes, unpack_integers
from lowbit_strategy.methods.zoo.residual_reducer import ResidualReducer
from lowbit_strategy.options.configuration import configuration

_ZEROS = 121  # a byte of five zeros; bytes of trits go up to 242
_FIRST_RUN, _SHORTEST, _LONGEST = 243, 2, 14
_EXPECTED = 4  # times shorter than five to a byte, for Gaussian gradients with a sparsity of 1


def code_runs(plain_B: Tensor) -> Tensor:
    """uint8: 2 to 14 bytes of `_ZEROS` in a row as one byte."""
    values, counts = torch.unique_consecutive(plain_B, return_counts=True)
    zeros = values == _ZEROS
    coded = torch.where(zeros, -(-counts // _LONGEST), counts)
    out = values.repeat_interleave(coded)
    last = coded.cumsum(0)[zeros] - 1
    out[zeros.repeat_interleave(coded)] = _FIRST_RUN + _LONGEST - _SHORTEST
    rest = (counts[zeros] - 1) % _LONGEST + 1
    out[last] = torch.where(rest >= _SHORTEST, _FIRST_RUN + rest - _SHORTEST, _ZEROS).to(torch.uint8)
    return out


def decode_runs(coded_B: Tensor) -> Tensor:
    """The inverse of `code_runs`."""
    runs = coded_B >= _FIRST_RUN
    lengths = torch.where(runs, coded_B.long() - (_FIRST_RUN - _SHORTEST), 1)
    return torch.where(runs, _ZEROS, coded_B).to(torch.uint8).repeat_interleave(lengths)


def _message(head: Tensor, trits: Sequence[Tensor]) -> Tensor:
    packed = torch.cat([pack_integers(part[None], 1)[0] for part in trits])
    return torch.cat([head, code_runs(packed)])


def _read(wire: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """float32: each parameter's values in one rank's message."""
    head = 4 * len(sizes)
    packed = decode_runs(wire[head:]).split([packed_nbytes(size, 1) for size in sizes])
    for scale, part, size in zip(wire[:head].clone().view(torch.float32), packed, sizes, strict=True):
        yield unpack_integers(part[None], size, 1)[0] * scale


@configuration
class ThreeLC(ReducingCompressor, ResidualReducer):
    """Three values per element with error feedback; five elements to a byte, runs of zeros as one byte.

    For each parameter, on every rank:

    1. ``h = g + e``
    2. ``M = sparsity * max|h|``; ``q = round(h / M)`` is -1, 0 or 1
    3. ``e' = h - M q``
    4. five q to a byte, values 0 to 242; 2 to 14 bytes of zeros in a row are one byte, 243 to 255
    5. DDP: all ranks get all messages, padded to the longest; FSDP2: each owner gets its rows. The mean of ``M q``

    One large element turns all others into zeros: few bytes, but stale errors. In effect this is a top-k with signs
    whose count depends on the gradient.

    Args:
        sparsity: Factor in [1, 2). Larger: more zeros.

    References:
        Lim, Andersen, Kaminsky, "3LC: Lightweight and Effective Traffic Compression for Distributed Machine Learning",
        2019, arXiv 1802.07389, section 3. There a server codes the mean again.
    """

    name: ClassVar[str] = "threelc"
    temporary_nbytes: ClassVar[float] = 2.3

    sparsity: float = 1.0

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        if not 1.0 <= self.sparsity < 2.0:
            raise ValueError(f"sparsity must be in [1, 2), got {self.sparsity!r}: from 2 on all elements are zeros")

    @property
    def label(self) -> str:
        return f"3lc, sparsity {self.sparsity:g}"

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        views = [view for view in views if view.spec.numel]
        if not views:
            return
        scales, trits = [], []
        for view, condition in zip(views, accumulate_(views, state), strict=True):
            scale, trits_N = self._quantized(view, state[view.spec.name]["residual"], condition)
            scales.append(scale)
            trits.append(trits_N)
        head = torch.stack(scales).view(torch.uint8)
        if views[0].spec.sharded:
            rows = [view.rows(trits_N) for view, trits_N in zip(views, trits, strict=True)]
            wires = [_message(head, [rows_WN[rank] for rows_WN in rows]) for rank in range(comm.world_size)]
            received = yield from scatter_uneven(wires, comm)
        else:
            received = yield from gather_uneven(_message(head, trits), comm)
        sizes = [view.out.numel() for view in views]
        totals = [torch.zeros(size, dtype=torch.float32, device=head.device) for size in sizes]
        for wire in received:
            for total, part in zip(totals, _read(wire, sizes), strict=True):
                total += part
        for view, total in zip(views, totals, strict=True):
            view.out.copy_(total if view.spec.sharded else total / comm.world_size)

    def _quantized(self, view: ParamView, residual: Tensor, condition: Condition) -> tuple[Tensor, Tensor]:
        """The scale and int32 trits of one parameter; their error becomes the residual."""
        largest = residual.abs().max()
        scale = largest * self.sparsity if condition is Condition.LIVE else torch.zeros_like(largest)
        usable = scale >= torch.finfo(torch.float32).tiny
        scale = torch.where(usable, scale, 0.0)
        trits_N = (residual / torch.where(usable, scale, 1.0)).round().clamp(-1, 1).where(usable, 0.0)
        sent_N = trits_N * scale
        view.trace(residual if condition is Condition.LIVE else residual + view.flat(), sent_N)
        residual.sub_(sent_N)
        return scale if condition is not Condition.NONFINITE else scale + torch.nan, trits_N.int()

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 2

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        whole = -(-packed_nbytes(spec.numel, 1) // _EXPECTED)
        return (world_size - 1) * (4 + (whole // world_size if spec.sharded else whole))
