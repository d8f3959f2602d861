"""What a method is, and the one interface for the state it keeps.

A method turns every rank's gradient into their mean. Parameters with equal methods share a *store*, which holds their
state on this rank. Whatever the method, what it has not yet sent can be taken out of a store, or put into one, in units
of the gradient: live switches, checkpoints of another configuration and changes of the world size need nothing else.

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
from lowbit_strategy.methods._base.residuals import HOPS, read_residual, write_residual_

ReducerState = dict[str, StateTensors]  # by parameter name


class MethodStore:
    """State of all parameters that one method serves on this rank.

    Args:
        method: The rule.
        state: Tensors by parameter and name.
        numbers: What `unsent_part` needs to know besides the tensors of a parameter: plain numbers, saved with them.
        device: Where the tensors are.
        arenas: The tensors that those of `state` are views of, if they are.
    """

    hop: ClassVar[str] = ""  # what the names of the tensors begin with whose residual is of gradients

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

    def tensors(self, name: str) -> StateTensors:
        """All state of one parameter: writing changes the store. If it is parked, copies."""
        tensors = self.state.get(name, {})
        return {key: x.to(self._device) for key, x in tensors.items()} if self._parked else tensors

    def park(self) -> None:
        """Move all state to the host's memory; it is only read from now on, one parameter at a time."""
        self._parked, self.arenas = True, []
        self.state = {name: {key: x.cpu() for key, x in tensors.items()} for name, tensors in self.state.items()}

    def state_tensors(self) -> list[Tensor]:
        """Everything the store holds, in as few tensors as possible."""
        return self.arenas or [x for tensors in self.state.values() for x in tensors.values()]

    def numbers(self, name: str) -> dict[str, Any]:
        return self._numbers[name]

    def rescale_(self, factor: float) -> None:
        self.method.rescale_(self.state, factor)

    def residual(self, name: str) -> Tensor | None:
        """float32 ``[numel]``: what is added to the next gradient; None where the method keeps none."""
        values = read_residual(self.tensors(name), self.hop)
        return None if values is None else _without_padding(values, self.numbers(name))

    def import_unsent_(self, name: str, values: Tensor) -> bool:
        """Make float32 ``[numel]``, in units of the gradient, the parameter's residual.

        The parameter's state must be fresh. Returns False, and does nothing, where the method keeps no residual.
        """
        tensors, numbers = self.tensors(name), self.numbers(name)
        residual = tensors.get(f"{self.hop}residual")
        if residual is None:
            return False
        world_size, row_numel = _rows(numbers)
        scaled = values.to(residual.device) * numbers["residual_gain"]
        rows = pad(scaled, (0, row_numel * world_size - numbers["numel"])).view(world_size, row_numel)
        room = residual.numel() // world_size
        write_residual_(tensors, pad(rows, (0, room - row_numel)).reshape(-1), self.hop)
        return True

    def export_unsent(self, name: str) -> Tensor | None:
        """float32 ``[numel]``: this rank's share of what has not been sent yet, in units of the gradient.

        Its mean over ranks is what the results so far lack. None where the method keeps no residual.
        """
        return unsent_part(self.tensors(name), self.numbers(name))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.state_tensors())


class Method(ABC):
    """A rule for turning every rank's gradient into their mean; hashable."""

    whole_model: ClassVar[bool] = False  # takes all parameters of a step at once

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for reports."""

    @property
    def block_size(self) -> int:
        """Elements that shares start on multiples of, under DDP."""
        return 1

    @property
    def idle_numel(self) -> int | None:
        """Elements of a share that send nothing if their gradients are all zero; None: the parameter as a whole."""
        return None

    @property
    def residual_gain(self) -> float | None:
        """The same as `Codec.residual_gain`."""
        return None

    @abstractmethod
    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """Bytes this rank sends to others for one reduction of `spec`, exact or, for data-dependent sizes, expected."""

    def serves(self, spec: TensorSpec) -> bool:
        """Whether it can reduce `spec`, which may be a part of a parameter that it was chosen for."""
        return True

    @abstractmethod
    def make_store(self, specs: Mapping[str, TensorSpec], comm: Comm, device: torch.device) -> MethodStore:
        """Fresh state on `device` for the parameters `specs`, which the ranks of `comm` reduce."""

    @abstractmethod
    def rescale_(self, state: ReducerState, factor: float | Tensor) -> None:
        """The loss scale changed by `factor`: everything that is in units of the gradient follows."""

    def rescale_residual_(self, tensors: StateTensors, factor: float | Tensor) -> None:
        """What has not been sent yet of one parameter counts as `factor` times as much; other state stays."""
        for hop in HOPS:
            key = f"{hop}residual_scale" if f"{hop}residual_scale" in tensors else f"{hop}residual"
            if key in tensors:
                tensors[key].mul_(factor)

    def description(self, spec: TensorSpec) -> str:
        """The `label`, with that of the downlink where it differs."""
        return self.label

    def conserves(self, spec: TensorSpec) -> bool:
        """Whether everything that came in has come out or is in a residual; False where something is given up."""
        return self.residual_gain is not None

    @abstractmethod
    def keeps_zero_rows(self, spec: TensorSpec) -> bool:
        """Whether a row whose gradient has been zero on all ranks from the first step on comes out as zeros.

        Rows of embeddings that no sample has and that pad are such. Otherwise only whole blocks of zeros do.
        """

    def rests(self, spec: TensorSpec) -> bool:
        """Whether a gradient of zeros on all ranks leaves all state as it was."""
        return False

    def continues(self, earlier: Method) -> bool:
        """Whether all state that `earlier` leaves means the same to this method, and not the residual alone."""
        return self == earlier


def finite_gain(residual_gain: float | None) -> float:
    """Residual per unit not yet sent; 1 where a method gives no law."""
    return 1.0 if residual_gain is None or math.isinf(residual_gain) else residual_gain


def unsent_part(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Tensor | None:
    """What a parameter's state, live or saved, has not sent yet: float32 ``[numel]``, in units of the gradient.

    A sender has not sent ``residual / residual_gain`` of its own gradient. An owner has not sent the same of the mean
    of its share, and a sender's gradient is 1 / W of that mean. None where there is no residual.
    """
    numel: int = numbers["numel"]
    if not any("." in key for key in tensors):
        values = read_residual(tensors)
        return None if values is None else _without_padding(values, numbers) / numbers["residual_gain"]
    world_size, row_numel = _rows(numbers)
    unsent: Tensor | None = None
    if (values := read_residual(tensors, "uplink.")) is not None:
        unsent = _without_padding(values, numbers) / numbers["residual_gain"]
    if (values := read_residual(tensors, "downlink.")) is not None:
        start, length = numbers["rank"] * row_numel, row_length(numel, row_numel, numbers["rank"])
        unsent = torch.zeros(numel, dtype=torch.float32, device=values.device) if unsent is None else unsent
        unsent[start : start + length] += values[:length] * (world_size / numbers["downlink_residual_gain"])
    return unsent


def _rows(numbers: Mapping[str, Any]) -> tuple[int, int]:
    """How many rows of how many elements, padding of blocks left out, a residual consists of."""
    return numbers.get("world_size", 1), numbers.get("row_numel", numbers["numel"])


def _without_padding(values: Tensor, numbers: Mapping[str, Any]) -> Tensor:
    """float32 ``[numel]`` of a residual's rows of whole blocks."""
    world_size, row_numel = _rows(numbers)
    return values.view(world_size, -1)[:, :row_numel].reshape(-1)[: numbers["numel"]]
