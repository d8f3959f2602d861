"""Time of sparse methods on one core: the whole reduce, and the choice alone, against torch.topk in the same run.

A whole reduce is accumulating, choosing, encoding, summing and writing the mean. On one rank nothing travels, and
nothing is decoded; with ``--ranks`` 2 another rank is taken to send the same, which is decoded and added like any
message. Each method starts from a residual of some steps. torch.topk gets the magnitudes ready made and gives positions
without order. The least of several repeats counts, of the thread's processor time: others may use the machine.

    python benchmarks/selection.py --numel 16777216 --numel 589824 --numel 65536 --json selection.json
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import flat_cut
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.select import CHUNK_NUMEL, chunk_top_k, select_above, top_k
from lowbit_strategy.kernels.sums import Sum
from lowbit_strategy.methods._base.reducer import Reducer, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_compressor import SparseCompressor
from lowbit_strategy.methods._sparse_base.sparse_reducer import SparseReducer
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.sidco import SIDCo

_CPU = torch.device("cpu")
_TRAFFIC = {"pass: copy": 2, "pass: add": 3, "pass: add, check, select": 3}  # elements that are moved per element
_WARM_UP = 4  # steps before anything is timed: residuals, thresholds and stages settle


def _seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


class _Method:
    """One method with one parameter."""

    def __init__(self, compressor: SparseCompressor, numel: int, ranks: int = 1) -> None:
        spec = TensorSpec("weight", (numel,))
        reducer = compressor.method(spec)
        assert isinstance(reducer, Reducer)
        self.reducer = reducer
        self.state = reducer.init([spec], _CPU)
        self.x = torch.empty(numel)
        self.view = View(spec, flat_cut(numel, ranks, 1), self.x, self.x, scatter=False)
        self.comm = LocalComm(ranks)

    def reduce(self, index: int) -> None:
        wait_for_all(self.reducer.reduce([self.view], self.state, self.comm, StepContext(index, index, index)))

    def choose(self, index: int) -> None:
        """The choice alone, of methods in which each parameter has its own."""
        assert isinstance(self.reducer, SparseReducer)
        state = self.state["weight"]
        self.reducer.choose(self.view, Sum(state["residual"]), state, StepContext(index, index, index))


def _measure(numel: int, density: float, steps: int, ranks: int) -> list[dict[str, Any]]:
    kept = max(1, round(density * numel))
    methods = {
        "topk": _Method(TopK(density=density), numel, ranks),
        "dgc": _Method(DGC(density=density), numel, ranks),
        "sidco": _Method(SIDCo(density=density), numel, ranks),
        "exdyna": _Method(ExDyna(density=density), numel, ranks),
    }
    times: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    for step in range(_WARM_UP + steps):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        magnitudes = methods["topk"].state["weight"]["residual"].add(gradient).abs_()
        found = {
            **_passes(magnitudes, gradient),
            "torch.topk": _seconds(lambda m=magnitudes: torch.topk(m, kept, sorted=False)),
            "exact top-k, choice": _seconds(lambda m=magnitudes: top_k(m, kept)),
            "chunks, choice": _chunks(magnitudes, density),
        }
        for name, method in methods.items():
            if name in ("dgc", "sidco"):
                method.choose(step)  # a gradient's worth less than what the reduce below chooses from
                found[f"{name}, choice"] = _seconds(lambda method=method, step=step: method.choose(step))
            method.x.copy_(gradient)
            found[name] = _seconds(lambda method=method, step=step: method.reduce(step))
            if step >= _WARM_UP:
                counts.setdefault(name, []).append(int(method.x.count_nonzero()))
        if step >= _WARM_UP:
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)
    reference = min(times["torch.topk"])
    return [
        {
            "numel": numel,
            "density": density,
            "case": name,
            "ms": min(values) * 1e3,
            "over_torch_topk": min(values) / reference,
            "gigabytes_per_s": 4e-9 * numel * _TRAFFIC.get(name, 1) / min(values),
            "count_over_target": sum(counts[name]) / len(counts[name]) / kept if name in counts else None,
        }
        for name, values in sorted(times.items())
    ]


def _passes(x: Tensor, gradient: Tensor) -> dict[str, float]:
    """What memory allows: the passes that a reduce consists of, each on its own."""
    sums, room = x.clone(), torch.zeros_like(x)
    return {
        "pass: copy": _seconds(lambda: room.copy_(x)),
        "pass: zero": _seconds(room.zero_),
        "pass: read (sum)": _seconds(gradient.sum),
        "pass: add": _seconds(lambda: sums.add_(gradient)),
        "pass: add, check, select": _seconds(lambda: select_above(sums, math.inf, expected=0, addend=gradient)),
        "pass: select": _seconds(lambda: select_above(sums, math.inf, expected=0)),
    }


def _chunks(x: Tensor, density: float) -> float:
    whole = x[: x.numel() // CHUNK_NUMEL * CHUNK_NUMEL]
    kept = max(1, round(CHUNK_NUMEL * density))
    kept_M = torch.full((whole.numel() // CHUNK_NUMEL,), kept, dtype=torch.int32)
    return _seconds(lambda: chunk_top_k(whole, kept_M, kept))


def main(
    numel: Annotated[list[int] | None, typer.Option(help="Elements; may be given several times.")] = None,
    density: Annotated[list[float] | None, typer.Option(help="Densities; may be given several times.")] = None,
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 12,
    ranks: Annotated[int, typer.Option(help="Ranks that are taken to send what this one does.")] = 1,
    path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time sparse methods against torch.topk."""
    torch.set_num_threads(1)
    console = Console()
    rows = [row for n in numel or [1 << 24] for d in density or [0.001] for row in _measure(n, d, steps, ranks)]
    table = Table("elements", "density", "case", "ms", "times torch.topk", "GB/s", "count / target")
    for row in rows:
        count = "" if row["count_over_target"] is None else f"{row['count_over_target']:.3f}"
        figures = (f"{row['ms']:.3f}", f"{row['over_torch_topk']:.2f}", f"{row['gigabytes_per_s']:.2f}", count)
        table.add_row(f"{row['numel']:,}", f"{row['density']:g}", row["case"], *figures)
    console.print(table)
    if path is not None:
        result = {"steps": steps, "ranks": ranks, "backend": backends.describe(_CPU), "rows": rows}
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
