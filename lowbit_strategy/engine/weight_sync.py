"""The weights of one model under FSDP2: how each sharded module gathers them, and what is saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.layout import ParamView, dim0_row_numel
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.weight_gather import WeightGather
from lowbit_strategy.collectives.weight_rows import CodecParams
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout


class ModuleWeights:
    """The weights of one module: its gather.

    Args:
        layout: What is gathered.
        coding: How weights are coded.
        comm, device, buffers, flags: Shared by all modules.

    Attributes:
        reduced: Whether its gradients have been reduced since it was gathered for a forward pass.
        world_size: The number of ranks that share its weights.
    """

    def __init__(
        self,
        layout: ModuleLayout,
        coding: WeightCoding,
        comm: Gathering,
        device: torch.device,
        buffers: WireBuffers,
        flags: StepFlags,
    ) -> None:
        self.reduced, self.world_size = False, comm.world_size
        rows = [dim0_row_numel(spec.shape, comm.world_size) for spec in layout.specs]
        self.row_numel = sum(rows)
        parts = self._parts(coding, layout, rows, comm.world_size) if layout.has_codes(coding) else None
        keep = "nothing" if parts is None and coding.keep == "codes" else coding.keep
        self.is_ours = parts is not None or coding.keep == "replica"  # or FSDP2's own gathers do
        self.gather = WeightGather(
            parts,
            self.row_numel,
            comm,
            device,
            keep=keep,
            differences=coding.sends_differences,
            buffers=buffers,
            flags=flags,
        )

    def _parts(
        self, coding: WeightCoding, layout: ModuleLayout, rows: Sequence[int], world_size: int
    ) -> list[CodecParams]:
        params: dict[Codec | None, list[ParamView]] = {}
        at = 0
        for spec, row_numel in zip(layout.specs, rows, strict=True):
            param = ParamView(spec, world_size, row_numel, at, self.row_numel)
            params.setdefault(coding.codec(spec), []).append(param)
            at += row_numel
        return [CodecParams(codec, tuple(members)) for codec, members in params.items()]

    def gradients_reduced(self) -> None:
        """The next forward pass must gather again, because an optimizer will have changed the weights.

        Backward passes that are running still use the weights of their forward pass.
        """
        self.reduced = True

    def begin_forward(self) -> None:
        if self.reduced:
            self.invalidate()

    def invalidate(self) -> None:
        """The weights have changed: the next gather sends them. Call it on all ranks."""
        self.reduced = False
        self.gather.invalidate()


class WeightSync:
    """The weights of one model on one rank.

    Args:
        coding: How weights are coded.
        layouts: The sharded modules, by names that are the same in every run.
        comms: How messages reach the ranks that share a module's weights, by the module's name.

    Attributes:
        comms: The distinct values of `comms`.
        step_nbytes: Bytes that this rank sent in the last step, counted.
        flags: Records weights that were changed behind the engine's back.
    """

    def __init__(
        self,
        coding: WeightCoding,
        layouts: Mapping[str, ModuleLayout],
        comms: Mapping[str, Gathering],
        device: torch.device,
    ) -> None:
        self.coding = coding
        self.layouts = dict(layouts)
        self.comms = list(dict.fromkeys(comms.values()))
        self.buffers = WireBuffers(device, several=any(each.between.is_far for each in self.comms))
        self.flags = StepFlags(device)
        self.modules = {
            name: ModuleWeights(layout, coding, comms[name], device, self.buffers, self.flags)
            for name, layout in layouts.items()
        }
        self.step_nbytes = 0
        self._uncoded_nbytes = 0  # sent by FSDP2 itself in training
        self._sent_before = 0  # when the step began

    # -- gathers --------------------------------------------------------------------------------------------------

    def count_exact(self, nbytes: int) -> None:
        """Count `nbytes` that this rank sends because FSDP2 itself gathers weights in training."""
        self._uncoded_nbytes += nbytes

    def invalidate(self) -> None:
        """The weights have changed: what is kept is old. Call it on all ranks."""
        for module in self.modules.values():
            module.invalidate()

    def unchanged(self) -> None:
        """The reduced gradients were those of a micro-batch: weights do not change before the next one."""
        for module in self.modules.values():
            module.reduced = False

    def loaded(self) -> None:
        """Other weights have been loaded. Call it on all ranks."""
        for module in self.modules.values():
            module.gather.forget()

    def forget(self) -> None:
        """A checkpoint is loaded: differences start over, unless it contains their replica. Call it on all ranks."""
        for module in self.modules.values():
            module.gather.restore(None)

    def end_step(self) -> None:
        """The step is over. Ranks may notice this at different times, some after weights for the next step have been
        gathered, so whatever changes weights calls `invalidate`.

        Raises:
            RuntimeError: On CUDA, in the step before a rank sent a message of another layout.
        """
        self.flags.raise_if_broken(self.comms[0].rank)
        sent = sum(comm.sent_nbytes for comm in self.comms)
        self.step_nbytes = sent - self._sent_before + self._uncoded_nbytes
        self._sent_before, self._uncoded_nbytes = sent, 0

    # -- what is saved --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's rows of the replicas to which differences refer; empty if only whole weights are sent."""
        rows = {name: module.gather.own_row() for name, module in self.modules.items()}
        return {"rows": {name: row for name, row in rows.items() if row is not None}}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """Restore a `state_dict`. After a change of the number of ranks or of the model nothing is restored: the next
        gather sends the weights exactly.
        """
        rows: Mapping[str, Tensor] = next(iter(states))["rows"]
        fits = all(name in self.modules and row.numel() == self.modules[name].row_numel for name, row in rows.items())
        for name, module in self.modules.items():
            module.gather.restore(rows.get(name) if own and fits and self.coding.sends_differences else None)
