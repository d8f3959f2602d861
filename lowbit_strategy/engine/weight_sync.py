"""The weights of one model under FSDP2: how each sharded module gathers them, and what is saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
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


def _gather(
    layout: ModuleLayout,
    coding: WeightCoding,
    comm: Gathering,
    device: torch.device,
    buffers: WireBuffers,
    flags: StepFlags,
) -> WeightGather:
    """The gather of one module's weights. All modules share `comm`, `device`, `buffers` and `flags`."""
    rows = [dim0_row_numel(spec.shape, comm.world_size) for spec in layout.specs]
    return WeightGather(
        _parts(layout, coding, rows, comm.world_size) if layout.has_codes(coding) else None,
        sum(rows),
        comm,
        device,
        keep=coding.keep,
        differences=coding.sends_differences,
        buffers=buffers,
        flags=flags,
    )


def _parts(layout: ModuleLayout, coding: WeightCoding, rows: Sequence[int], world_size: int) -> list[CodecParams]:
    """The parameters of each codec, as they lie in a row."""
    params: dict[Codec | None, list[ParamView]] = {}
    *offsets, stride = accumulate(rows, initial=0)
    for spec, row_numel, at in zip(layout.specs, rows, offsets, strict=True):
        params.setdefault(coding.codec(spec), []).append(ParamView(spec, world_size, row_numel, at, stride))
    return [CodecParams(codec, tuple(members)) for codec, members in params.items()]


class WeightSync:
    """The weights of one model on one rank.

    Args:
        coding: How weights are coded.
        layouts: The sharded modules, by names that are the same in every run.
        comms: How messages reach the ranks that share a module's weights, by the module's name.

    Attributes:
        modules: The gather of each module.
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
            name: _gather(layout, coding, comms[name], device, self.buffers, self.flags)
            for name, layout in layouts.items()
        }
        self.step_nbytes = 0
        self._uncoded_nbytes = 0  # bytes that FSDP2 itself sends in training
        self._sent_before = 0  # bytes sent before the step began

    # -- gathers --------------------------------------------------------------------------------------------------

    def count_exact(self, nbytes: int) -> None:
        """Count `nbytes` that this rank sends because FSDP2 itself gathers weights in training."""
        self._uncoded_nbytes += nbytes

    def invalidate(self) -> None:
        """Mark kept weights as old, because the weights have changed. Call it on all ranks."""
        for module in self.modules.values():
            module.invalidate()

    def unchanged(self) -> None:
        """Keep using the kept weights in the next micro-batch, because no optimizer has stepped."""
        for module in self.modules.values():
            module.unchanged()

    def loaded(self) -> None:
        """Call this on all ranks when different weights have been loaded."""
        for module in self.modules.values():
            module.loaded()

    def forget(self) -> None:
        """Start differences over, unless the loaded checkpoint contains their replica. Call it on all ranks."""
        for module in self.modules.values():
            module.forget()

    def end_step(self) -> None:
        """End the step. Ranks may notice this at different times, some after weights for the next step have been
        gathered, so whatever changes weights calls `invalidate`.

        Raises:
            RuntimeError: On CUDA: in the previous step a rank sent a message with a different layout.
        """
        self.flags.raise_if_broken(self.comms[0].rank)
        sent = sum(comm.sent_nbytes for comm in self.comms)
        self.step_nbytes = sent - self._sent_before + self._uncoded_nbytes
        self._sent_before, self._uncoded_nbytes = sent, 0

    # -- what is saved --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's rows of the replicas to which differences refer; empty if only whole weights are sent."""
        rows = {name: module.own_row() for name, module in self.modules.items()}
        return {"rows": {name: row for name, row in rows.items() if row is not None}}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]], *, own: bool) -> None:
        """Restore a `state_dict`. If the number of ranks or the model has changed, nothing is restored, and the next
        gather sends exact weights.
        """
        rows: Mapping[str, Tensor] = next(iter(states))["rows"]
        fits = all(name in self.modules and row.numel() == self.modules[name].row_numel for name, row in rows.items())
        for name, module in self.modules.items():
            module.restore(rows.get(name) if own and fits and self.coding.sends_differences else None)
