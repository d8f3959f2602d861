"""One model's weights under FSDP2: how each sharded module's are gathered, what that costs, and what is saved of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.gathering import Gathering
from lowbit_strategy.collectives.layout import Slot, dim0_cut
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.weight_gather import CodecSlots, WeightGather
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.plan.weights import ModuleLayout, has_codes, module_weights


class ModuleWeights:
    """The weights of one module: its gather, and what that is to cost.

    Args:
        layout: What is gathered.
        coding: How.
        comm, device, buffers, flags: Shared by all modules.
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
        self.layout = layout
        self._reduced = False  # its gradients, since it was gathered for a forward pass
        cuts = [dim0_cut(spec.shape, comm.world_size) for spec in layout.specs]
        self.row_numel = sum(cut.row_numel for cut in cuts)
        parts = self._parts(coding, cuts)
        keep = "nothing" if parts is None and coding.keep == "codes" else coding.keep
        self.is_ours = parts is not None or coding.keep == "replica"  # or FSDP2's own gathers do
        self.costs = module_weights(coding, layout, comm.world_size)
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

    def _parts(self, coding: WeightCoding, cuts: Sequence[Any]) -> list[CodecSlots] | None:
        if not has_codes(coding, self.layout):
            return None
        slots: dict[Codec | None, list[Slot]] = {}
        at = 0
        for spec, cut in zip(self.layout.specs, cuts, strict=True):
            slots.setdefault(coding.codec(spec), []).append(Slot(spec.name, at, self.row_numel, cut))
            at += cut.row_numel
        return [CodecSlots(codec, tuple(members)) for codec, members in slots.items()]

    def gradients_reduced(self) -> None:
        """Its gradients have been reduced: whatever steps on them, the next forward pass has other weights.

        Backward passes under way still compute with what their forward pass had.
        """
        self._reduced = True

    def begin_forward(self) -> None:
        """A forward pass wants the weights."""
        if self._reduced:
            self.invalidate()

    def unchanged(self) -> None:
        """Nothing steps on the gradients that have been reduced: those of a micro-batch."""
        self._reduced = False

    def invalidate(self) -> None:
        """The weights have changed: the next gather sends. On all ranks."""
        self._reduced = False
        self.gather.invalidate()

    def promised_nbytes(self, num_coded: int, num_exact: int) -> int:
        """Bytes for so many messages."""
        return num_coded * self.costs.gather_nbytes + num_exact * self.costs.exact_nbytes


class WeightSync:
    """The weights of one model on one rank.

    Args:
        coding: How they travel.
        layouts: The sharded modules, by a name for each that is the same in every run.
        comm: How messages travel to all ranks.
        device: Of weights.

    Attributes:
        step_nbytes: Bytes this rank sent for weights in the last step that ended, counted; None before the first.
        evaluation_nbytes: Sent for exact weights outside of training.
    """

    def __init__(
        self, coding: WeightCoding, layouts: Mapping[str, ModuleLayout], comm: Gathering, device: torch.device
    ) -> None:
        self.coding = coding
        self.layouts = dict(layouts)
        self.comm = comm
        self.buffers = WireBuffers(device, several=comm.is_far)
        self._flags = StepFlags(device)
        self.modules = {
            name: ModuleWeights(layout, coding, comm, device, self.buffers, self._flags)
            for name, layout in layouts.items()
        }
        self.step_nbytes: int | None = None
        self.evaluation_nbytes = 0
        self._uncoded_nbytes = 0  # sent by FSDP2 itself in training
        self._before = (0, 0, 0)  # counted, promised, framing at most when the step began

    # -- gathers --------------------------------------------------------------------------------------------------

    def count_exact(self, nbytes: int, *, training: bool) -> None:
        """FSDP2 gathers weights as they are: this rank sends `nbytes`."""
        if training:
            self._uncoded_nbytes += nbytes
        else:
            self.evaluation_nbytes += nbytes

    def invalidate(self) -> None:
        """The weights have changed: what is kept is old. On all ranks."""
        for module in self.modules.values():
            module.invalidate()

    def unchanged(self) -> None:
        """The gradients that have been reduced are those of a micro-batch: no weights change before the next one."""
        for module in self.modules.values():
            module.unchanged()

    def check_unchanged(self, name: str, noted: Tensor, present: Tensor) -> None:
        """What is kept of a module is about to be used: its owner's row must be the one that was sent.

        Args:
            name: The module's.
            noted: int64 ``[1]``, the digest of the own row when it was sent.
            present: The same, now.

        Raises:
            RuntimeError: They differ. On CUDA at the end of a later step.
        """
        self._flags.check_unchanged(noted, present, name)

    def forget(self) -> None:
        """Other weights have been loaded. On all ranks."""
        for module in self.modules.values():
            module.gather.forget()

    def restart(self) -> None:
        """A checkpoint is loaded: differences begin anew, unless it has what they are from. On all ranks."""
        for module in self.modules.values():
            module.gather.restore(None)

    def end_step(self) -> None:
        """The step is over.

        Raises:
            RuntimeError: More or fewer bytes were sent than was promised; or, on CUDA, in the step before a rank sent a
                message of another layout.
        """
        self.invalidate()
        self._flags.raise_if_broken(self.comm.rank)
        now = (self.comm.sent_nbytes, self._promised_nbytes(), self._framing_nbytes())
        sent, expected, framing = (after - before for after, before in zip(now, self._before, strict=True))
        self.step_nbytes = sent + self._uncoded_nbytes
        self._before, self._uncoded_nbytes = now, 0
        if not 0 <= sent - expected <= framing:
            raise RuntimeError(
                f"rank {self.comm.rank} sent {sent} bytes for weights in this step where {expected} and at most"
                f" {framing} of framing were expected: this is a fault of lowbit_strategy, please report it"
            )

    def _promised_nbytes(self) -> int:
        return sum(
            module.promised_nbytes(module.gather.num_sent - module.gather.num_exact, module.gather.num_exact)
            for module in self.modules.values()
        )

    def _framing_nbytes(self) -> int:
        return sum(module.costs.framing_nbytes * module.gather.num_sent for module in self.modules.values())

    @property
    def nbytes(self) -> int:
        """Bytes this rank sent in the last step that ended; before there was one: those planned."""
        return self.planned_nbytes if self.step_nbytes is None else self.step_nbytes

    # -- cost -----------------------------------------------------------------------------------------------------

    @property
    def planned_nbytes(self) -> int:
        """Bytes this rank sends per step of one forward and one backward pass, framing aside."""
        return sum(module.costs.step_nbytes for module in self.modules.values())

    # -- what is saved --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The own rows of the replicas that differences are from; empty where nothing else is sent."""
        rows = {name: module.gather.own_row() for name, module in self.modules.items()}
        return {
            "world_size": self.comm.world_size,
            "rank": self.comm.rank,
            "rows": {name: row.detach().cpu().clone() for name, row in rows.items() if row is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s. Of another number of ranks, or another model, there is nothing to restore: the next
        gather sends the weights exactly.
        """
        rows: Mapping[str, Tensor] = state["rows"]
        same = state["world_size"] == self.comm.world_size and state["rank"] == self.comm.rank
        fits = all(name in self.modules and row.numel() == self.modules[name].row_numel for name, row in rows.items())
        for name, module in self.modules.items():
            module.gather.restore(rows.get(name) if same and fits and self.coding.sends_differences else None)
