"""Speed of the CPU kernels as a share of memcpy's in the same run.

Encode and LoCo encode: bytes of float32 read per second (4 N / time), whatever else is read and written.
Decode-and-sum: bytes of float32 decoded and added a second, per source (W * 4 N / time).
memcpy: bytes read plus bytes written a second (8 N / time), the faster of libc's and torch's.

The cases take turns, so that what else the machine does meets all of them alike. With one thread the processor time of
that thread counts, so that waiting for a core does not; with more, wall-clock time.

    python benchmarks/cpu_kernels.py --numel 16777216 --json cpu_kernels.json
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from lowbit_strategy.kernels import backends, native
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, e2m1, ternary, uniform
from lowbit_strategy.kernels.segments import Segment, Segments

MEMCPY = "memcpy"


@dataclass(kw_only=True, slots=True)
class Case:
    """One row of the table: what runs, and how many bytes of float32 a run counts for."""

    name: str
    backend: str
    nbytes: int
    run: Callable[[], object]
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    backend: str
    best_gb_per_s: float
    median_gb_per_s: float
    best_over_memcpy: float
    median_over_memcpy: float


def formats(numel: int, block_size: int) -> dict[str, BlockFormat]:
    def fitted(bits: int, *positive: float) -> BlockFormat:
        codebook = (*(-value for value in reversed(positive)), *positive)
        return BlockFormat(bits=bits, block_size=block_size, scale_rule="rms", codebook=codebook)

    return {
        "4 bits": uniform(4, block_size),
        "8 bits": uniform(8, block_size),
        "2 bits": uniform(2, block_size),
        "4 bits, e2m1": e2m1(block_size),
        "fitted 2 bits": fitted(2, 0.453125, 1.5078125),
        "fitted 1 bit": fitted(1, 0.796875),
        "ternary": ternary(block_size),
    }


def cases(numel: int, block_size: int, repeats: int, isa: str | None) -> list[Case]:
    x, copy = torch.randn(numel, generator=torch.Generator().manual_seed(0)), torch.empty(numel)
    libc_copy = Case(
        name=MEMCPY,
        backend="libc",
        nbytes=8 * numel,
        run=lambda: ctypes.memmove(copy.data_ptr(), x.data_ptr(), 4 * numel),
        repeats=repeats,
    )
    torch_copy = Case(name=MEMCPY, backend="torch", nbytes=8 * numel, run=lambda: copy.copy_(x), repeats=repeats)
    found = [libc_copy, torch_copy]
    for backend in ("native", "torch") if native.available() else ("torch",):
        times = repeats if backend == "native" else min(repeats, 3)
        label = f"native {isa or native.isa()}" if backend == "native" else backend
        for name, fmt in formats(numel, block_size).items():
            for what, weight, run in kernel_runs(x, copy, fmt):
                bound = bind(run, backend, isa)
                found.append(
                    Case(name=f"{what}, {name}", backend=label, nbytes=weight * 4 * numel, run=bound, repeats=times)
                )
    return found


def bind(run: Callable[[], None], backend: str, isa: str | None) -> Callable[[], None]:
    def bound() -> None:
        os.environ[backends.OVERRIDE] = backend
        if isa is not None:
            os.environ[native.ISA_OVERRIDE] = isa
        run()

    return bound


def kernel_runs(x: torch.Tensor, out: torch.Tensor, fmt: BlockFormat) -> list[tuple[str, int, Callable[[], None]]]:
    """Name, sources that a run decodes (1 for encoding), and the run itself."""
    numel = x.numel()
    segments = Segments([Segment(0, numel, 0, 0)])
    wire_WB = torch.zeros(4, fmt.wire_nbytes(numel), dtype=torch.uint8)
    padded = fmt.num_blocks(numel) * fmt.block_size
    residual = torch.zeros(padded, dtype=torch.int8)
    residual_scale = torch.zeros(padded // fmt.block_size, dtype=torch.bfloat16)
    flag = torch.zeros(1, dtype=torch.int32)
    for wire in wire_WB:  # nobody times the decoding of zeros
        encode_(x, wire, segments, fmt, flag=flag)

    def loco(stochastic_residual: bool) -> Callable[[], None]:
        feedback = Feedback(residual, residual_scale, 0.8, stochastic=stochastic_residual)
        return lambda: encode_(x, wire_WB[0], segments, fmt, flag=flag, seed=1, feedback=feedback)

    return [
        ("encode", 1, lambda: encode_(x, wire_WB[0], segments, fmt, flag=flag)),
        ("LoCo encode", 1, loco(False)),
        ("LoCo encode, stochastic residual", 1, loco(True)),
        ("decode, W=1", 1, lambda: decode_sum_(wire_WB[:1], out, segments, fmt)),
        ("decode, W=4", 4, lambda: decode_sum_(wire_WB, out, segments, fmt, alpha=0.25)),
    ]


def measure(chosen: list[Case], clock: Callable[[], float]) -> list[Row]:
    seconds: dict[int, list[float]] = {index: [] for index in range(len(chosen))}
    for turn in range(max(case.repeats for case in chosen)):
        for index, case in enumerate(chosen):
            if turn < case.repeats:
                start = clock()
                case.run()
                seconds[index].append(clock() - start)
    best = [case.nbytes / min(seconds[index]) / 1e9 for index, case in enumerate(chosen)]
    median = [case.nbytes / statistics.median(seconds[index]) / 1e9 for index, case in enumerate(chosen)]
    copies = [index for index, case in enumerate(chosen) if case.name == MEMCPY]
    best_copy, median_copy = max(best[index] for index in copies), max(median[index] for index in copies)
    return [
        Row(
            name=case.name,
            backend=case.backend,
            best_gb_per_s=round(best[index], 2),
            median_gb_per_s=round(median[index], 2),
            best_over_memcpy=round(best[index] / best_copy, 3),
            median_over_memcpy=round(median[index] / median_copy, 3),
        )
        for index, case in enumerate(chosen)
    ]


def main(
    numel: Annotated[int, typer.Option(help="Elements.", min=1)] = 1 << 24,
    block_size: Annotated[int, typer.Option(help="Elements that share a scale.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each case; plain PyTorch gets at most 3.", min=1)] = 15,
    threads: Annotated[int, typer.Option(help="Threads of torch and of the kernels.", min=1)] = 1,
    isa: Annotated[str | None, typer.Option(help="avx512, avx2 or portable; default: the fastest here.")] = None,
    only: Annotated[str, typer.Option(help="Run the cases whose name or backend holds this text, and memcpy.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Time the CPU kernels against memcpy."""
    torch.set_num_threads(threads)
    chosen = [
        case
        for case in cases(numel, block_size, repeats, isa)
        if case.name == MEMCPY or only in case.name or only in case.backend
    ]
    rows = measure(chosen, time.thread_time if threads == 1 else time.perf_counter)
    table = Table("kernel", "backend", "GB/s best", "median", "over memcpy: best", "median")
    for row in rows:
        table.add_row(*map(str, asdict(row).values()))
    Console().print(table)
    if json_path is not None:
        context = {"numel": numel, "block_size": block_size, "threads": threads, "torch": torch.__version__}
        json_path.write_text(json.dumps({**context, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
