"""The part of plans in every run: it checks bytes, and reports a step's time and bytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.chooser import Chooser
from lowbit_strategy.plan.byte_check import ByteCheck
from lowbit_strategy.plan.mesh_dims import note_dims
from lowbit_strategy.plan.running import expect
from lowbit_strategy.plan.step_line import StepTimes


class PlanPart(Part):
    """Checks the bytes of each step, and logs step times."""

    def __init__(self, options: Any) -> None:
        """Take the options, as every part does."""

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> None:
        expect(sync, module)
        note_dims(sync, module)
        ByteCheck(sync)
        if sync.ranks.logs and not prepared.in_rounds and not isinstance(prepared.compressor, Chooser):
            StepTimes(sync)
