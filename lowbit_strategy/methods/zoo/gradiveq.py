"""GradiVeQ: slices of the gradient in a common basis of principal components."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import flattened, ordered_nbytes, shaped_like, sum_each
from lowbit_strategy.kernels.matrices import product
from lowbit_strategy.kernels.reference.blocks import to_blocks
from lowbit_strategy.methods._base.compressor import DENSE, Assignment, Compressor, ReducingCompressor
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods.zoo.residual_reducer import ResidualReducer
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration


def _principal(slices_SK: Tensor, kept: int) -> Tensor:
    """float32 [K, kept]: the eigenvectors of the largest eigenvalues of the slices' second moments."""
    unit = slices_SK / slices_SK.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.linalg.eigh(unit.T @ unit).eigenvectors[:, -kept:].contiguous()


@configuration
class GradiVeQ(ReducingCompressor, ResidualReducer):
    """Sends slices of the gradient as coefficients of principal components, which are added up over ranks.

    For each parameter, cut into slices of `slice_size` elements, on every rank:

    1. ``h = g + e``
    2. in every `period`-th step rank ``step mod W`` broadcasts the principal components of its slices of h
    3. each slice's coefficients in the first `slice_size / ratio` of them are added up over ranks, as floats
    4. the result is decoded from the mean coefficients; ``e'`` is h minus what this rank's coefficients decode to

    It pays if neighboring elements of a gradient are correlated, as in the filters of convolutions.

    Args:
        slice_size: Elements per slice.
        ratio: Elements per coefficient that is sent.
        period: Steps between two bases.
        exempt: Parameters that stay dense; see `Compressor`. Those with fewer than `slice_size` slices stay dense too.

    References:
        Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN
        Training", 2018, arXiv 1811.03617, section 4. There the basis comes from gradients that were sent uncompressed,
        and errors are lost.
    """

    name: ClassVar[str] = "gradiveq"
    temporary_nbytes: ClassVar[float] = 3.6

    slice_size: int = 64
    ratio: int = 8
    period: int = 100

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        for name in ("slice_size", "ratio", "period"):
            check_positive(name, getattr(self, name))
        if self.slice_size % self.ratio:
            raise ValueError(f"slice_size must be a multiple of ratio, got {self.slice_size} and {self.ratio}")

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is None and spec.numel < self.slice_size * self.slice_size:
            return Assignment(DENSE, "exempt", "its basis would not be much smaller")
        return assignment or Assignment(self.method(spec), "compressed", self.name)

    @property
    def kept(self) -> int:
        """Coefficients of a slice."""
        return self.slice_size // self.ratio

    @property
    def label(self) -> str:
        return f"{self.kept} of {self.slice_size} principal components"

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return False  # a slice may span two rows

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """``basis`` [slice_size, kept] is zeros before the first step."""
        state = ResidualReducer.init(self, specs, device)
        for tensors in state.values():
            tensors["basis"] = torch.zeros(self.slice_size, self.kept, dtype=torch.float32, device=device)
        return state

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        views = [view for view in views if view.spec.numel]
        if not views:
            return
        sums = [view.flat().float() + state[view.spec.name]["residual"] for view in views]
        slices = [to_blocks(h_N, self.slice_size) for h_N in sums]
        bases = [state[view.spec.name]["basis"] for view in views]
        if step.index % self.period == 0 or not all(bool(basis.any()) for basis in bases):
            yield from self._update_bases_(slices, bases, comm, step.index % comm.world_size)
        own = [x @ basis for x, basis in zip(slices, bases, strict=True)]
        totals = yield from sum_each(own, comm)
        for view, h_N, basis, coefficients, total in zip(views, sums, bases, own, totals, strict=True):
            numel = view.spec.numel
            sent_N = product(coefficients, basis).reshape(-1)[:numel]
            view.trace(h_N, sent_N)
            self.store_error_(state[view.spec.name]["residual"], h_N - sent_N)
            view.write_mean_(product(total / comm.world_size, basis).reshape(-1)[:numel], comm.rank)

    def _update_bases_(
        self, slices: list[Tensor], bases: list[Tensor], comm: Comm, leader: int
    ) -> Generator[Pending, None, None]:
        """The leader's principal components become the basis of all ranks."""
        found = bases[0].new_empty(sum(basis.numel() for basis in bases))
        if comm.rank == leader:
            found = flattened([_principal(x.nan_to_num(0.0, 0.0, 0.0), self.kept) for x in slices])
        yield comm.broadcast(found, leader)
        for basis, each in zip(bases, shaped_like(bases, found), strict=True):
            basis.copy_(each)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 2

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """The basis as a mean over steps and senders."""
        coefficients = -(-spec.numel // self.slice_size) * self.kept
        basis = 4 * (world_size - 1) * self.slice_size * self.kept // (world_size * self.period)
        return ordered_nbytes(coefficients, 4, world_size) + (basis if spec.numel else 0)
