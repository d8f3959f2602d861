"""Time to select, on one core, against torch.topk in the same run; and how near the count comes to the target.

Each method selects from a float32 gradient accumulated over some steps (its own residual, so that what it left behind
is there). Timed is the selection alone: threshold, positions and values. torch.topk gets the magnitudes ready made and
gives positions without order. The cases take turns, and the thread's processor time counts.

    python benchmarks/selection.py --numel 16777216 --json selection.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import flat_cut
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.select import top_k
from lowbit_strategy.methods._base.reducer import View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.exclusive_partitions import ExclusiveReducer, _Model
from lowbit_strategy.methods._sparse_base.fitted_thresholds import DISTRIBUTIONS
from lowbit_strategy.methods._sparse_base.sparse_reducer import Condition, EntriesCompressor, SparseReducer
from lowbit_strategy.methods.sparsification.dgc import DGC
from lowbit_strategy.methods.sparsification.exdyna import ExDyna
from lowbit_strategy.methods.sparsification.sidco import SIDCo

_CPU = torch.device("cpu")
Select = Callable[[int], Tensor]
Prepare = Callable[[Tensor], Select]


class _Alone:
    """A communicator of one rank."""

    world_size, rank = 1, 0

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> None:
        out_WB.copy_(x_B.expand_as(out_WB))

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Any, in_splits: Any) -> None:
        out.copy_(x)


def _finish(stages: Generator[Any, None, Any]) -> Any:
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            return stop.value


def _entries(compressor: EntriesCompressor, spec: TensorSpec) -> tuple[Tensor, Select]:
    """A method in which each rank chooses by itself: its residual, and its choice in a step."""
    reducer = cast(SparseReducer, compressor.method(spec))
    tensors = reducer.init([spec], _CPU)[spec.name]
    view = View(spec, flat_cut(spec.numel, 1, 1), tensors["residual"], tensors["residual"], False)
    return tensors["residual"], lambda index: reducer.choose(view, tensors, StepContext(index, index, index)).indices


def _exclusive(density: float, spec: TensorSpec) -> tuple[Tensor, Select]:
    """ExDyna on one rank, which then has the whole model for its partition: its worst case."""
    reducer = ExDyna(density=density).method(spec)
    state = reducer.init([spec], _CPU)
    control = state[spec.name]
    residual = control["residual"]
    view = View(spec, flat_cut(spec.numel, 1, 1), residual, residual, False)

    def select(index: int) -> Tensor:
        step = StepContext(index, index, index)
        model = _Model([view], [Condition.LIVE], state, cast(Comm, _Alone()), step)
        return _select_exclusive(reducer, model, control)

    return residual, select


def _select_exclusive(reducer: ExclusiveReducer, model: _Model, control: dict[str, Tensor]) -> Tensor:
    bounds = model.bounds(reducer._sizes(model, control))
    threshold = _finish(reducer._threshold(model, control, bounds))
    selection = _finish(model.select(threshold, bounds))
    reducer._learn_(model, control, selection)
    return cast(Tensor, selection.indices[0])


def _time(function: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.thread_time()
    result = function()
    return time.thread_time() - start, result


def _measure(numel: int, density: float, steps: int, console: Console) -> list[dict[str, Any]]:
    spec = TensorSpec("weight", (numel,))
    wanted = max(1, round(density * numel))
    methods = {"exdyna": _exclusive(density, spec), "dgc": _entries(DGC(density=density), spec)}
    for distribution in DISTRIBUTIONS:
        methods[f"sidco {distribution}"] = _entries(SIDCo(density=density, distribution=distribution), spec)
    times: dict[str, list[float]] = {name: [] for name in (*methods, "torch.topk", "exact top-k")}
    counts: dict[str, list[int]] = {name: [] for name in methods}
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        gradient = torch.randn(numel, generator=generator)
        for name, (residual, select) in methods.items():
            residual.add_(gradient)
            magnitudes = residual.abs() if name == "dgc" else None
            seconds, indices = _time(lambda select=select, step=step: select(step))
            times[name].append(seconds)
            counts[name].append(indices.numel())
            if magnitudes is not None:  # what the reference sorts is of the same kind
                times["torch.topk"].append(_time(lambda m=magnitudes: torch.topk(m, wanted, sorted=False).indices)[0])
                times["exact top-k"].append(_time(lambda r=residual: top_k(r, wanted)[0])[0])
            residual.index_fill_(0, indices.long(), 0.0)
        console.print(f"density {density:g}: step {step + 1} of {steps}", style="dim")
    late = steps // 2
    reference = statistics.median(times["torch.topk"][late:])
    rows = []
    for name, values in times.items():
        seconds = statistics.median(values[late:])
        ratio = None if name not in counts else statistics.mean(counts[name][late:]) / wanted
        rows.append(
            {"density": density, "method": name, "ms": seconds * 1e3, "speedup": reference / seconds, "count": ratio}
        )
    return rows


def main(
    numel: Annotated[int, typer.Option(help="Elements of the gradient.")] = 1 << 24,
    density: Annotated[list[float] | None, typer.Option(help="Densities; may be given several times.")] = None,
    steps: Annotated[int, typer.Option(help="Steps; the second half is measured.")] = 12,
    path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time to select against torch.topk."""
    torch.set_num_threads(1)
    console = Console()
    rows = [row for d in density or [0.001, 0.01] for row in _measure(numel, d, steps, console)]
    table = Table(
        "density", "method", "ms", "times faster than torch.topk", "count / target", title=f"{numel:,} elements"
    )
    for row in rows:
        count = "" if row["count"] is None else f"{row['count']:.3f}"
        table.add_row(f"{row['density']:g}", row["method"], f"{row['ms']:.1f}", f"{row['speedup']:.1f}", count)
    console.print(table)
    if path is not None:
        result = {"numel": numel, "steps": steps, "backend": backends.describe(_CPU), "rows": rows}
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
