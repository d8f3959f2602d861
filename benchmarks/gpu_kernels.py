"""Speed of the Triton kernels as a share of a device-to-device copy's in the same run.

Bytes are those a kernel has to move: each input read once, each output written once. A copy counts what it reads and
what it writes. Time is the GPU's alone: launching takes the host longer than some kernels run. First every format is
compared with the reference, bit for bit; a difference ends the run.

    python benchmarks/gpu_kernels.py --json gpu_kernels.json
    python benchmarks/gpu_kernels.py --sweep --shard 0/8      # other tiles and warps; an eighth takes some minutes
    python benchmarks/gpu_kernels.py --offline                # instructions, registers, warps: no GPU needed
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lowbit_strategy.advisor.measured import device_seconds_of
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, e2m1, uniform
from lowbit_strategy.kernels.reference import blocks as reference
from lowbit_strategy.kernels.segments import Segment, Segments
from testing.kernels.cases import FITTED_1, FITTED_2, check_case, codebook_format, core_cases

ARCHITECTURES = (80, 90)
SOURCES = (2, 8, 64)
FORMATS: dict[str, BlockFormat] = {
    "4bit": uniform(4, 128),
    "8bit": uniform(8, 128),
    "2bit": uniform(2, 128),
    "e2m1": e2m1(128),
    "fitted2": codebook_format(2, FITTED_2),
    "fitted1": codebook_format(1, FITTED_1, 128, "mean_abs"),
}
NUM_SETS = 3  # buffers take turns, so that no run finds its input in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel call: its name, the bytes it has to move, and a function of the buffer set and the launch."""

    name: str
    nbytes: int
    run: Callable[[int, object], None]
    launches: tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    launch: str
    median_ms: float
    gb_per_s: float
    share_of_copy: float


def launches(vector: int) -> tuple[object, ...]:
    """What --sweep tries."""
    from lowbit_strategy.kernels.triton.layout import Launch

    choices = itertools.product((8, 16, 32, 64), (1, 2, 4, 8), sorted({4, 8, 16, vector}))
    return tuple(Launch(elements_per_thread=e, num_warps=w, vector=v) for e, w, v in choices if v <= e)


def loco_work(numel: int) -> Iterator[Work]:
    from lowbit_strategy.kernels.triton import blocks

    segments = Segments([Segment(0, numel, 0, 0, 1)])
    for (name, fmt), dtype, dithered in itertools.product(
        FORMATS.items(), (torch.float32, torch.bfloat16), (False, True)
    ):
        if dithered and name != "4bit":
            continue
        num_blocks = fmt.num_blocks(numel)
        residuals = [torch.zeros(num_blocks * fmt.block_size, dtype=torch.int8, device="cuda") for _ in range(NUM_SETS)]
        scales = [torch.zeros(num_blocks, dtype=torch.bfloat16, device="cuda") for _ in range(NUM_SETS)]
        x, wire, flag = gradients(numel, dtype), wires(fmt, numel), torch.zeros(1, dtype=torch.int32, device="cuda")

        def run(
            i: int, launch: object, *, fmt=fmt, x=x, r=residuals, s=scales, wire=wire, flag=flag, dithered=dithered
        ) -> None:
            options = {"stochastic": False, "seed": 5, "feedback": Feedback(r[i], s[i], 0.8, stochastic=dithered)}
            blocks.encode_(x[i], wire[i], segments, fmt, flag=flag, launch=launch, **options)

        nbytes = numel * (dtype.itemsize + 2) + 4 * num_blocks + fmt.wire_nbytes(numel)
        label = f"loco {name} {str(dtype).removeprefix('torch.')}" + (" dithered residual" if dithered else "")
        yield Work(name=label, nbytes=nbytes, run=run, launches=launches(16))


def encode_work(numel: int) -> Iterator[Work]:
    from lowbit_strategy.kernels.triton import blocks

    segments = Segments([Segment(0, numel, 0, 0, 1)])
    for name, fmt in FORMATS.items():
        x, wire, flag = gradients(numel, torch.float32), wires(fmt, numel), torch.zeros(1, dtype=torch.int32).cuda()

        def run(i: int, launch: object, *, fmt=fmt, x=x, wire=wire, flag=flag) -> None:
            blocks.encode_(x[i], wire[i], segments, fmt, stochastic=False, seed=5, flag=flag, launch=launch)

        nbytes = numel * 4 + fmt.wire_nbytes(numel)
        yield Work(name=f"encode {name} float32", nbytes=nbytes, run=run, launches=launches(16))


def decode_work(numel: int) -> Iterator[Work]:
    from lowbit_strategy.kernels.triton import blocks

    for (name, fmt), num in itertools.product(FORMATS.items(), SOURCES):
        size = numel if num <= 8 else numel // 8  # there is room for so many messages
        segments = Segments([Segment(0, size, 0, 0, 1)])
        wire = [torch.empty(num, fmt.wire_nbytes(size), dtype=torch.uint8, device="cuda") for _ in range(NUM_SETS)]
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        for i, s in itertools.product(range(NUM_SETS), range(num)):
            x = torch.randn(size, device="cuda")
            blocks.encode_(x, wire[i][s], segments, fmt, stochastic=False, seed=5, flag=flag)
        out = [torch.empty(size, device="cuda") for _ in range(NUM_SETS)]

        def run(i: int, launch: object, *, fmt=fmt, wire=wire, out=out, num=num, segments=segments) -> None:
            blocks.decode_sum_(wire[i], out[i], segments, fmt, alpha=1 / num, launch=launch)

        nbytes = size * 4 + num * fmt.wire_nbytes(size)
        yield Work(name=f"decode_sum {name} W={num}", nbytes=nbytes, run=run, launches=launches(4))


def dense_work(numel: int) -> Iterator[Work]:
    from lowbit_strategy.kernels.triton import dense

    segments = Segments([Segment(0, numel, 0, 0)])
    for name in ("float32", "bfloat16"):
        fmt = DenseFormat(name)
        x, flag = gradients(numel, torch.float32), torch.zeros(1, dtype=torch.int32).cuda()
        wire = [torch.zeros(4, fmt.wire_nbytes(numel), dtype=torch.uint8, device="cuda") for _ in range(NUM_SETS)]

        def encode(i: int, launch: object, *, fmt=fmt, x=x, wire=wire, flag=flag) -> None:
            dense.encode_(x[i], wire[i][0], segments, fmt, flag=flag)

        def decode(i: int, launch: object, *, fmt=fmt, x=x, wire=wire) -> None:
            dense.decode_sum_(wire[i], x[i], segments, fmt, alpha=0.25)

        once = fmt.wire_nbytes(numel)
        yield Work(name=f"encode dense {name}", nbytes=numel * 4 + once, run=encode, launches=())
        yield Work(name=f"decode_sum dense {name} W=4", nbytes=numel * 4 + 4 * once, run=decode, launches=())


def gradients(numel: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(numel, device="cuda").to(dtype) for _ in range(NUM_SETS)]


def wires(fmt: BlockFormat, numel: int) -> list[Tensor]:
    return [torch.empty(fmt.wire_nbytes(numel), dtype=torch.uint8, device="cuda") for _ in range(NUM_SETS)]


def median_ms(run: Callable[[int], None], repeats: int) -> float:
    device = torch.device("cuda", torch.cuda.current_device())
    for i in range(NUM_SETS):
        run(i)
    return statistics.median(1e3 * device_seconds_of(partial(run, i % NUM_SETS), device) for i in range(repeats))


def copy_gb_per_s(numel: int, repeats: int) -> float:
    source, target = gradients(numel, torch.float32), gradients(numel, torch.float32)
    ms = median_ms(lambda i: target[i].copy_(source[i]), repeats)
    return 8 * numel / ms / 1e6


def check(seed: int) -> None:
    """The tests' cases of these formats, and large random tensors, against the reference; exits on a difference."""
    from lowbit_strategy.kernels.triton import blocks

    chosen = [case for case in core_cases() if case.fmt in FORMATS.values()]
    wrong = [line for case in chosen for line in check_case(case, blocks, 4096, "cuda")]
    generator = torch.Generator().manual_seed(seed)
    for name, fmt in FORMATS.items():
        numel = int(torch.randint(3_000_000, 4_000_000, (1,), generator=generator))
        segments, x = Segments([Segment(0, numel, 0, 0, 1)]), torch.randn(numel, generator=generator)
        flag, want = torch.zeros(1, dtype=torch.int32), torch.full((fmt.wire_nbytes(numel),), 77, dtype=torch.uint8)
        got = torch.full_like(want, 77).cuda()
        reference.encode_(x, want, segments, fmt, stochastic=False, seed=1, flag=flag)
        blocks.encode_(x.cuda(), got, segments, fmt, stochastic=False, seed=1, flag=flag.cuda())
        if not torch.equal(got.cpu(), want):
            wrong.append(f"encode of {numel} random elements, {name}: {int((got.cpu() != want).sum())} bytes differ")
    if wrong:
        sys.exit("the kernels differ from the reference:\n" + "\n".join(wrong))
    print("every format equals the reference, bit for bit")


def measure(numel: int, repeats: int, only: str, sweep: bool, *, shard: int = 0, of: int = 1) -> dict[str, object]:
    """Figures of the kernels whose name holds `only`, or of every `of`-th of them."""
    rows: list[Row] = []
    copies = [copy_gb_per_s(numel, repeats)]
    for work in itertools.chain(*(make(numel) for make in (loco_work, encode_work, decode_work, dense_work))):
        if only not in work.name or zlib.crc32(work.name.encode()) % of != shard:
            continue
        copies.append(copy_gb_per_s(numel, repeats))
        for launch in (None, *work.launches) if sweep else (None,):
            try:
                ms = median_ms(lambda i, work=work, launch=launch: work.run(i, launch), repeats)
            except (
                Exception
            ) as error:  # Triton has errors of its own for a launch that does not fit; the default one must
                if launch is None:
                    raise
                print(f"{work.name} {launch}: {error}", file=sys.stderr)
                continue
            speed = work.nbytes / ms / 1e6
            row = Row(
                name=work.name,
                launch="default" if launch is None else str(launch),
                median_ms=ms,
                gb_per_s=speed,
                share_of_copy=speed / statistics.median(copies[-2:]),
            )
            rows.append(row)
            print(
                f"{row.name:34} {row.gb_per_s:8.0f} GB/s {row.share_of_copy:6.2f} of a copy   {row.launch}", flush=True
            )
    copy = statistics.median(copies)
    print(f"{'copy':34} {copy:8.0f} GB/s")
    device = torch.cuda.get_device_name()
    return {"device": device, "numel": numel, "copy_gb_per_s": copy, "rows": [asdict(row) for row in rows]}


def offline() -> dict[str, object]:
    """What the compiled code says, for GPUs that are not there: `testing/kernels/figures.py`."""
    import triton

    from testing.kernels.figures import all_figures

    return {"triton": triton.__version__, "kernels": all_figures()}


def shard_of(text: str) -> tuple[int, int]:
    """Two numbers of ``i/n``."""
    shard, _, of = text.partition("/")
    if not (shard.isdigit() and of.isdigit() and int(shard) < int(of)):
        raise argparse.ArgumentTypeError(f"must be i/n with i from 0 to n - 1, such as 0/8, got {text!r}")
    return int(shard), int(of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 27, help="elements of the gradient")
    parser.add_argument("--repeats", type=int, default=30, help="runs of each kernel; the median counts")
    parser.add_argument("--only", default="", help="kernels whose name holds this text")
    parser.add_argument("--seed", type=int, default=0, help="of the random tensors that are compared")
    parser.add_argument("--sweep", action="store_true", help="also other tile sizes, numbers of warps and vectors")
    parser.add_argument("--shard", type=shard_of, default=(0, 1), help="i/n: only the i-th of n parts of the kernels")
    parser.add_argument("--offline", action="store_true", help="compile only: instructions, registers, warps as JSON")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.offline:
        figures = offline()
        print(json.dumps(figures, indent=1))
    elif not torch.cuda.is_available():
        print("no CUDA device here: run this on a GPU, or --offline for what the compiler says", file=sys.stderr)
        sys.exit(2)
    else:
        check(arguments.seed)
        shard, of = arguments.shard
        only, sweep = arguments.only, arguments.sweep
        figures = measure(arguments.numel, arguments.repeats, only, sweep, shard=shard, of=of)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
