"""ErrorBudget: a level for each group of parameters; fewest bytes under a bound on the error, or the reverse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.control.base import (
    Controller,
    Decision,
    GroupBy,
    Probe,
    State,
    Telemetry,
    end_to_end_error,
    grouped,
)
from lowbit_strategy.control.levels import check_order
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


@configuration
class ErrorBudget(Controller):
    """Spend the error (or the bytes) where it buys most.

    Every `interval` steps:

    1. every rank tries all `choices` on its gradients plus residuals and sums the squared errors by parameter
    2. dynamic programming over the groups picks a level for each: least bytes with
       ``sqrt(sum of squared errors / sum of squares) <= max_error``, or least error with at most `max_bits`

    Before the first solution all parameters have the lightest choice. Parameters that every choice treats alike
    (exempt ones) are left out of both sums.

    Args:
        choices: Configurations from light to heavy, at least two; any compressors.
        max_error: Bound on the relative error of all groups together.
        max_bits: Bound on the mean bits per element and hop: uplink and downlink under DDP, the uplink under FSDP2.
            Exactly one of the two bounds is given.
        both_hops: Bound the error of the whole reduction, the result against the true mean over ranks, instead of the
            uplink's: errors are scaled by how the two compared in the step of the measurement, with what was in force.
        interval: Steps between two solutions.
        group_by: What shares a level: each ``parameter``, a ``module``, a ``kind`` (the same layer of all blocks), or
            a function of the name.
        resolution: Steps into which the bound is divided; costs are rounded up, so the bound itself is kept.

    Raises:
        ValueError: A field is out of range, the choices are not in order, or the bound cannot be met: for bytes when
            training starts, for the error at the first solution.

    References:
        Alimohammadi et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient and Accurate Deep
        Learning", 2022, arXiv 2210.17357, section 3 (the idea; worked out anew here).
    """

    choices: tuple[Compressor, ...]
    max_error: float | None = None
    max_bits: float | None = None
    both_hops: bool = False
    interval: int = 200
    group_by: GroupBy = "parameter"
    resolution: int = 4096

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise ValueError("choices must have at least two configurations, from light to heavy")
        if (self.max_error is None) == (self.max_bits is None):
            raise ValueError("give either max_error or max_bits: one is bounded, the other made small")
        if self.both_hops and self.max_error is None:
            raise ValueError("both_hops says what max_error is about: give max_error, or leave both_hops out")
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise ValueError(f"max_error must be between 0 and 1, got {self.max_error!r}")
        if self.max_bits is not None and not self.max_bits > 0:
            raise ValueError(f"max_bits must be positive, got {self.max_bits!r}")
        for name in ("interval", "resolution"):
            check_positive(name, getattr(self, name))
        check_order(self.choices, [f"choices[{at}]" for at in range(len(self.choices))])

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return self.choices

    def init(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool = False) -> State:
        world_size = max(world_size, 2)
        nbytes: dict[str, list[int]] = {}
        elements = 0
        for spec in specs:
            methods = [level.assign(spec).method for level in self.choices]
            if len(set(methods)) > 1:
                nbytes[spec.name] = [method.wire_nbytes(spec, world_size, scatter=scatter) for method in methods]
                elements += spec.numel
        levels = {spec.name: 0 for spec in specs}
        state: State = {"levels": levels, "nbytes": nbytes, "max_nbytes": None, "solved": False}
        if self.max_bits is not None:
            hops = 1 if scatter else 2
            ring = hops * (world_size - 1) / world_size  # how often an element crosses the wire uncompressed
            state["max_nbytes"] = self.max_bits / 8 * elements * ring
            least = sum(min(sizes) for sizes in nbytes.values())
            if least > state["max_nbytes"]:
                bits = least * 8 / (elements * ring)
                raise ValueError(
                    f"max_bits={self.max_bits:g} cannot be met: the heaviest choices need {bits:.3g} bits per element;"
                    " raise max_bits or add a heavier choice"
                )
        return state

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        before, solved = state["levels"], state["solved"]
        levels = dict(before)
        warnings: tuple[str, ...] = ()
        if len(telemetry.energy) == len(self.choices):
            solution, problem = self._solve(telemetry, state)
            if problem and not solved:
                raise ValueError(problem)
            warnings = (problem,) if problem else ()
            levels |= solution
            solved = True
        bound = f"bits <= {self.max_bits:g}" if self.max_error is None else f"error <= {self.max_error:g}"
        reasons = dict.fromkeys(levels, f"budget solved again: {bound}")
        due = telemetry.progress.step % self.interval == 0
        return Decision(
            state=dict(state, levels=levels, solved=solved),
            levels=levels,
            probe=Probe(levels=tuple(range(len(self.choices))) if due else (), end_to_end=due and self.both_hops),
            switches=self.switches(before, levels, reasons),
            warnings=warnings,
        )

    def _solve(self, telemetry: Telemetry, state: State) -> tuple[dict[str, int], str]:
        """A level for each parameter that was measured, and what to change where the bound cannot be kept."""
        energy, nbytes, choices = telemetry.energy, state["nbytes"], range(len(self.choices))
        groups = list(grouped([name for name in nbytes if name in energy[0]], self.group_by).values())
        errors = [[sum(energy[at][name].error for name in names) for at in choices] for names in groups]
        sizes = [[float(sum(nbytes[name][at] for name in names)) for at in choices] for names in groups]
        total = sum(sum(energy[0][name].compensated for name in names) for names in groups) or 1.0
        scale = self._scale(telemetry, state["levels"], nbytes)
        if self.max_error is None:
            solution = cheapest(errors, sizes, state["max_nbytes"], self.resolution)
        else:
            solution = cheapest(sizes, errors, self.max_error**2 / scale * total, self.resolution)
        problem = ""
        if not solution.feasible:
            problem = (
                f"max_error={self.max_error:g} cannot be met: the lightest choices have a relative error of"
                f" {math.sqrt(scale * sum(map(min, errors)) / total):.3g}; raise max_error or add a lighter choice"
            )
        return {name: level for names, level in zip(groups, solution.levels, strict=True) for name in names}, problem

    def _scale(self, telemetry: Telemetry, levels: Mapping[str, int], names: Iterable[str]) -> float:
        """Squared end-to-end error over the uplink's, both relative, of the levels in force; 1 if not asked for."""
        names = [name for name in names if name in telemetry.end_to_end]
        energies = [telemetry.energy[levels[name]][name] for name in names]
        uplink = sum(energy.error for energy in energies) / (sum(energy.compensated for energy in energies) or 1.0)
        whole = end_to_end_error(telemetry, names)
        return 1.0 if not self.both_hops or whole is None or uplink == 0 else whole**2 / uplink


class Solution(NamedTuple):
    """A level for each group, and whether the bound holds."""

    levels: list[int]
    feasible: bool


def cheapest(
    values: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], bound: float, resolution: int
) -> Solution:
    """The choice, one option a group, of least total value with a total cost of at most `bound`.

    Dynamic programming over the bound in `resolution` steps: ``best[r]`` is the least value of the groups so far at a
    cost of at most r steps. Costs are rounded up to whole steps, so what is found keeps the bound; what only fits
    without rounding is found by falling back on each group's cheapest option. Of equal options the first wins.
    """
    cheapest_each = [min(range(len(row)), key=row.__getitem__) for row in costs]
    least = sum(row[at] for row, at in zip(costs, cheapest_each, strict=True))
    if least > bound:
        return Solution(cheapest_each, False)
    unit = bound / resolution if bound > 0 else 1.0
    best = torch.zeros(resolution + 1, dtype=torch.float64)
    picks: list[Tensor] = []
    steps = [[min(math.ceil(cost / unit), resolution + 1) for cost in row] for row in costs]
    for row_values, row_steps in zip(values, steps, strict=True):
        following = torch.full_like(best, math.inf)
        pick = torch.zeros(resolution + 1, dtype=torch.int32)
        for option, (value, shift) in enumerate(zip(row_values, row_steps, strict=True)):
            if shift <= resolution:
                reached = torch.full_like(best, math.inf)
                reached[shift:] = best[: resolution + 1 - shift] + value
                better = reached < following
                following = torch.where(better, reached, following)
                pick[better] = option
        best = following
        picks.append(pick)
    if not torch.isfinite(best[resolution]):
        return Solution(cheapest_each, True)
    levels, left = [], resolution
    for pick, row_steps in zip(reversed(picks), reversed(steps), strict=True):
        levels.append(int(pick[left]))
        left -= row_steps[levels[-1]]
    return Solution(levels[::-1], True)
