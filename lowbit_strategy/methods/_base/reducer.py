"""Methods that do their own communication (sparse, low-rank, whole-model), and the store of their state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.method import Method, MethodStore, ReducerState


class Reducer(Method):
    """A method that does its own communication. It is a frozen dataclass; state is passed in and changed in place.

    ``whole_model`` methods are given all parameters of a step at once: under DDP the engine collects the buckets and
    calls `reduce` on the last one; under FSDP2 each module counts as a model.
    """

    fixed_size: ClassVar[bool] = False  # whether bytes never depend on values: `wire_nbytes` is then exact

    @property
    def label(self) -> str:
        return type(self).__name__.removesuffix("Reducer").lower()

    @property
    def temporary_nbytes(self) -> float:
        """Temporary bytes per element that is reduced at a time, without state; measured in benchmarks/LOG.md."""
        return 0.0

    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        return True  # elements that are not chosen are zero, and so are products with a row of zeros

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """Make the initial state by parameter name; none by default.

        A tensor called ``residual``, flat in the parameter's order, is added to the next gradient, and carried over
        when the method changes. If it is int8, ``residual_scale`` has its scales.
        """
        return {}

    @abstractmethod
    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        """Write every view's mean, and yield whenever bytes travel. All ranks call this with the same parameters in the
        same order.

        Each view's `trace` must be called before its mean is written.
        """

    @abstractmethod
    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        """Number of consecutive collectives that `reduce` issues for these parameters together."""

    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        """Multiply everything that is in units of the gradient by `factor`, because the loss scale has changed."""
        for tensors in state.values():
            self.rescale_residual_(tensors, factor)

    @staticmethod
    def store_error_(residual_N: Tensor, error: Tensor) -> None:
        """Store the error in the residual where it is finite."""
        error_N = error.reshape(-1)
        residual_N.copy_(torch.where(error_N.isfinite(), error_N, residual_N))

    def make_store(self, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> MethodStore:
        gain = MethodStore.finite_gain(self.residual_gain)
        numbers = {name: {"numel": spec.numel, "residual_gain": gain} for name, spec in specs.items()}
        return MethodStore(self, self.init(list(specs.values()), device), numbers, device)
