"""The interface of methods, and of the state that they keep.

A method turns every rank's gradient into their mean. Parameters with equal methods share a *store*, which holds their
state on this rank. What a method has not sent yet can be taken out of a store, or put into one, in units of the
gradient. Live switches, checkpoints of a different configuration and changes of the world size need nothing else.

A `CodecPair` (`codec_pair.py`) has one codec per hop; all pairs of a bucket share its messages. A `Reducer`
(`reducer.py`) has its own communication.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit_strategy.codecs.base import StateTensors
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import TensorSpec, row_length
from lowbit_strategy.methods._base.residuals import HOPS, RESIDUAL, SCALE, read_residual, write_residual_

ReducerState = dict[str, StateTensors]  # by parameter name


class MethodStore:
    """State of all parameters of one method on this rank.

    Args:
        method: The method.
        state: Tensors by parameter and name.
        numbers: Plain numbers that `unsent_part` needs in addition to a parameter's tensors; saved with them.
        device: Where the tensors are.
        arenas: The tensors of which `state` has views, if it has views.
    """

    hop: ClassVar[str] = ""  # prefix of the tensors that hold the residual of gradients

    def __init__(
        self,
        method: Method,
        state: ReducerState,
        numbers: Mapping[str, dict[str, Any]],
        device: torch.device,
        arenas: Iterable[Tensor] = (),
    ) -> None:
        self.method, self.state = method, state
        self._numbers, self._device, self.arenas = numbers, device, list(arenas)
        self._parked = False

    @staticmethod
    def finite_gain(residual_gain: float | None) -> float:
        """Residual per unit not yet sent, as one of `numbers`; 1 if a method has no conservation law."""
        return 1.0 if residual_gain is None or math.isinf(residual_gain) else residual_gain

    def tensors(self, name: str) -> StateTensors:
        """All state of one parameter: views that may be written, or copies if the store is parked."""
        tensors = self.state.get(name, {})
        return {key: x.to(self._device) for key, x in tensors.items()} if self._parked else tensors

    def park(self) -> None:
        """Move all state to the host's memory. From now on it is only read, one parameter at a time."""
        self._parked, self.arenas = True, []
        self.state = {name: {key: x.cpu() for key, x in tensors.items()} for name, tensors in self.state.items()}

    def state_tensors(self) -> list[Tensor]:
        """All state of the store, in as few tensors as possible."""
        return self.arenas or [x for tensors in self.state.values() for x in tensors.values()]

    def numbers(self, name: str) -> dict[str, Any]:
        return self._numbers[name]

    def rescale_(self, factor: float) -> None:
        self.method.rescale_(self.state, factor)

    def residual(self, name: str) -> Tensor | None:
        """What will be added to the next gradient, float32 ``[numel]``; None if the method keeps no residual."""
        values = read_residual(self.tensors(name), self.hop)
        return None if values is None else _without_padding(values, self.numbers(name))

    def import_unsent_(self, name: str, values: Tensor) -> bool:
        """Make float32 ``[numel]``, in units of the gradient, the parameter's residual.

        The parameter's state must be fresh. If the method keeps no residual, this returns False and does nothing.
        """
        tensors, numbers = self.tensors(name), self.numbers(name)
        residual = tensors.get(self.hop + RESIDUAL)
        if residual is None:
            return False
        world_size, row_numel = _rows(numbers)
        scaled = values.to(residual.device) * numbers["residual_gain"]
        rows = pad(scaled, (0, row_numel * world_size - numbers["numel"])).view(world_size, row_numel)
        room = residual.numel() // world_size
        write_residual_(tensors, pad(rows, (0, room - row_numel)).reshape(-1), self.hop)
        return True

    def export_unsent(self, name: str) -> Tensor | None:
        """This rank's share of what has not been sent yet, float32 ``[numel]``, in units of the gradient.

        Its mean over ranks is what earlier results lack. None if the method keeps no residual.
        """
        return unsent_part(self.tensors(name), self.numbers(name))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_tensors())


class Method(ABC):
    """A hashable rule for turning every rank's gradient into their mean."""

    whole_model: ClassVar[bool] = False  # whether it takes all parameters of a step at once

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for reports."""

    @property
    def block_size(self) -> int:
        """Shares start at multiples of this number of elements under DDP."""
        return 1

    @property
    def idle_numel(self) -> int | None:
        """Number of elements that send nothing if all their gradients are zero; None: those of the whole parameter."""
        return None

    @property
    def residual_gain(self) -> float | None:
        """The same as `Codec.residual_gain`."""
        return None

    @abstractmethod
    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """Bytes that this rank sends for one reduction of `spec`: exact, or expected if sizes depend on the data."""

    def serves(self, spec: TensorSpec) -> bool:
        """Whether it can reduce `spec`, perhaps a part of the parameter for which it was chosen."""
        return True

    @abstractmethod
    def make_store(self, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> MethodStore:
        """Make fresh state on `device` for the parameters `specs`, which the ranks of `comm` reduce."""

    @abstractmethod
    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        """The loss scale changed by `factor`: multiply everything that is in units of the gradient."""

    def rescale_residual_(self, tensors: StateTensors, factor: float | Tensor) -> None:
        """Multiply one parameter's unsent residual by `factor`; other state is unchanged."""
        for hop in HOPS:
            key = hop + SCALE if hop + SCALE in tensors else hop + RESIDUAL
            if key in tensors:
                tensors[key].mul_(factor)

    def description(self, spec: TensorSpec) -> str:
        """The `label`, with the downlink's if that differs."""
        return self.label

    def conserves(self, spec: TensorSpec) -> bool:
        """Whether all input has been sent or is in a residual; False if something is dropped."""
        return self.residual_gain is not None

    @abstractmethod
    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        """Whether a row whose gradient has been zero on all ranks since the first step has zeros in the result.

        Unused and padding rows of embeddings are examples. If False, only whole blocks of zeros do.
        """

    def rests(self, spec: TensorSpec) -> bool:
        """Whether a gradient of zeros on all ranks leaves all state unchanged."""
        return False

    def continues(self, earlier: Method) -> bool:
        """Whether all state of `earlier`, not only the residual, has the same meaning in this method."""
        return self == earlier


def unsent_part(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Tensor | None:
    """The unsent residual in a parameter's state, live or saved: float32 ``[numel]``, in units of the gradient.

    A sender has not sent ``residual / residual_gain`` of its own gradient; an owner has not sent the same of its
    share's mean, of which a sender's gradient is 1 / W. None if there is no residual.
    """
    numel: int = numbers["numel"]
    world_size, row_numel = _rows(numbers)
    unsent: Tensor | None = None
    for hop in ("", "uplink."):  # a reducer's, and a pair of codecs'
        if (values := read_residual(tensors, hop)) is not None:
            unsent = _without_padding(values, numbers) / numbers["residual_gain"]
    if (values := read_residual(tensors, "downlink.")) is not None:
        start, length = numbers["rank"] * row_numel, row_length(numel, row_numel, numbers["rank"])
        unsent = torch.zeros(numel, dtype=torch.float32, device=values.device) if unsent is None else unsent
        unsent[start : start + length] += values[:length] * (world_size / numbers["downlink_residual_gain"])
    return unsent


def _rows(numbers: Mapping[str, Any]) -> tuple[int, int]:
    """The number of rows of a residual, and the elements of each without the padding of blocks."""
    return numbers.get("world_size", 1), numbers.get("row_numel", numbers["numel"])


def _without_padding(values: Tensor, numbers: Mapping[str, Any]) -> Tensor:
    """A residual's rows of whole blocks as float32 ``[numel]``, without padding."""
    world_size, row_numel = _rows(numbers)
    return values.view(world_size, -1)[:, :row_numel].reshape(-1)[: numbers["numel"]]
