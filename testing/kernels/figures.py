"""What the compiled code of the kernels says about their speed: instructions, registers, warps, width of accesses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from lowbit_strategy.kernels.codebooks import unbiased_lloyd_max
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, e2m1, uniform
from lowbit_strategy.kernels.triton import dense
from lowbit_strategy.kernels.triton.blocks import loops_of
from lowbit_strategy.kernels.triton.layout import decode_launch, device_format, encode_launch
from lowbit_strategy.methods.zoo.kernels.chunk_top_k import CHUNK_NUMEL
from lowbit_strategy.methods.zoo.kernels.triton import rotation
from testing.kernels import offline
from testing.kernels.offline import Resources


class Gpu(NamedTuple):
    """A GPU of an architecture, by its data sheet; a copy's speed was measured on the H200, as a share for the others.

    Args:
        name: As sold.
        multiprocessors: Each issues 128 instructions of a thread per cycle.
        hertz: Clock under load.
        copy_nbytes_per_s: Read and written by a copy.
        float_rate: Instructions on float32 of a thread, per multiprocessor and cycle.
    """

    name: str
    multiprocessors: int
    hertz: float
    copy_nbytes_per_s: float
    float_rate: int


_OF_PEAK = 4157 / 4800  # of the H200's memory, by a copy
GPUS = {
    80: Gpu("A100 80 GB", 108, 1.41e9, 2.04e12 * _OF_PEAK, 64),
    90: Gpu("H200", 132, 1.98e9, 4.157e12, 128),
    100: Gpu("B200", 148, 1.965e9, 8.0e12 * _OF_PEAK, 128),
}
# Instructions of a thread, per multiprocessor and cycle: of all kinds, and of those that one unit runs. The programming
# guide's table of throughputs; what is not named (control, uniform registers) is issued and costs nothing else.
_ISSUED, _INTEGER_RATE, _CONVERSION_RATE, _MEMORY_RATE = 128, 64, 16, 32
_FLOAT = {"FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HMUL2", "HFMA2"}
_INTEGER = {"LOP3", "SHF", "IADD3", "VIADD", "LEA", "PRMT", "MOV", "SEL", "FSEL", "ISETP", "FSETP", "IABS", "SGXT"}
_INTEGER |= {"PLOP3", "IMNMX", "FMNMX", "FMNMX3", "VIMNMX", "VIMNMX3", "VIADDMNMX", "I2FP", "F2FP"}
_CONVERSION = {"I2F", "F2I", "F2F", "F2IP", "FRND", "MUFU"}
_MEMORY = {"LDG", "STG", "LDS", "STS", "LDSM", "SHFL"}
_REGISTERS, _WARPS = 65536, 64  # of a multiprocessor


class Work(NamedTuple):
    """A kernel that can be compiled: elements of a program, bytes moved per element, turns of its loops in order."""

    compile: Callable[[int], Resources]
    elements: int
    nbytes: float
    turns: tuple[int, ...] = ()


def _encode(fmt: BlockFormat, x: str = "bfloat16") -> Work:
    launch = encode_launch(device_format(fmt), torch.int8)
    nbytes = getattr(torch, x).itemsize + 2 + (fmt.code_nbytes + 6) / fmt.block_size  # both residuals, both scales

    def compiled(arch: int) -> Resources:
        return offline.encode_resources(fmt, x=x, residual="int8", launch=launch, arch=arch)

    return Work(compiled, launch.tile(fmt.block_size), nbytes)


def _decode(fmt: BlockFormat, sources: int) -> Work:
    launch, loops = decode_launch(device_format(fmt)), loops_of(sources)

    def compiled(arch: int) -> Resources:
        return offline.decode_sum_resources(fmt, out="float32", sources=sources, launch=launch, arch=arch)

    nbytes = 4 + sources * (fmt.code_nbytes + 2) / fmt.block_size
    turns = () if loops.unrolled else (loops.groups, loops.singles)
    return Work(compiled, launch.tile(fmt.block_size), nbytes, turns)


def _dense(dtype: Any, sources: int | None) -> Work:
    fmt, tile = DenseFormat(dtype), dense.LAUNCH.tile(1)
    if sources is None:
        return Work(lambda arch: offline.dense_encode_resources(fmt, x="float32", arch=arch), tile, 4 + fmt.code_nbytes)
    decoded = offline.dense_decode_sum_resources
    nbytes = 4 + sources * fmt.code_nbytes
    return Work(lambda arch: decoded(fmt, out="float32", sources=sources, arch=arch), tile, nbytes)


WORKS: dict[str, Work] = {
    "loco, 4 bits, bf16": _encode(uniform(4, 128)),
    "loco, E2M1, bf16": _encode(e2m1(128)),
    "loco, E2M1, float32": _encode(e2m1(128), "float32"),
    "loco, 8 bits, bf16": _encode(uniform(8, 128)),
    "loco, 2 bits unbiased, bf16": _encode(unbiased_lloyd_max(4, 64)),
    "loco, 1 bit unbiased, bf16": _encode(unbiased_lloyd_max(2, 32)),
    "sum of 8, 4 bits": _decode(uniform(4, 128), 8),
    "sum of 8, E2M1": _decode(e2m1(128), 8),
    "sum of 8, 8 bits": _decode(uniform(8, 128), 8),
    "sum of 8, 2 bits unbiased": _decode(unbiased_lloyd_max(4, 64), 8),
    "sum of 64, 4 bits": _decode(uniform(4, 128), 64),
    "sum of 64, E2M1": _decode(e2m1(128), 64),
    "sum of 64, 8 bits": _decode(uniform(8, 128), 64),
    "bfloat16 message": _dense("bfloat16", None),
    "sum of 8 bfloat16 messages": _dense("bfloat16", 8),
    "rotation of 32": Work(
        lambda arch: offline.rotate_resources(32, inverse=False, arch=arch), rotation.LAUNCH.tile(32), 8
    ),
    "largest of chunks": Work(lambda arch: offline.chunk_top_k_resources(arch=arch), CHUNK_NUMEL, 4, (31,)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Of one kernel on one architecture.

    Args:
        instructions: Of a thread, per element, in whole tiles.
        registers: Of a thread.
        warps: That fit on a multiprocessor.
        wide_share: Bytes that move in accesses of at least 8 bytes per thread, in whole tiles.
        share: Of a copy's speed that follows.
    """

    instructions: float
    registers: int
    warps: int
    wide_share: float
    share: float


def figures_of(name: str, arch: int) -> Figures:
    work, gpu = WORKS[name], GPUS[arch]
    found = work.compile(arch)
    with offline.whole_tiles():
        whole = work.compile(arch)
    executed, per_thread = whole.executed(work.turns), work.elements / found.threads
    per_warp = -(-found.registers // 8) * 8 * 32
    warps = min(_WARPS, _REGISTERS // per_warp) // (found.threads // 32) * (found.threads // 32)
    return Figures(
        instructions=round(executed.total() / per_thread, 1),
        registers=found.registers,
        warps=warps,
        wide_share=round(whole.wide_share, 2),
        share=round(share_of_copy(cycles_of(executed, gpu) / per_thread, work.nbytes, gpu), 2),
    )


def cycles_of(executed: Counter[str], gpu: Gpu) -> float:
    """Of a multiprocessor, for one thread: to issue everything, or those of the unit that takes longest."""
    units = (
        (_FLOAT, gpu.float_rate),
        (_INTEGER, _INTEGER_RATE),
        (_CONVERSION, _CONVERSION_RATE),
        (_MEMORY, _MEMORY_RATE),
    )
    times = [sum(count for name, count in executed.items() if name in names) / rate for names, rate in units]
    return max(executed.total() / _ISSUED, *times)


def share_of_copy(cycles: float, nbytes: float, gpu: Gpu) -> float:
    """Of a copy's speed, by what an element takes: the time to compute and the time to move add up as squares.

    That was within 0.05 of what an H200 did for sums of 8 and for E2M1. It knows nothing of latency: LoCo's encoder at
    4 bits on bfloat16, of which 16 warps fit, was 0.08 slower, and sums of 64, which wait for loads in a loop, more.
    """
    return 1 / math.hypot(1.0, cycles / (gpu.multiprocessors * gpu.hertz) * gpu.copy_nbytes_per_s / nbytes)


def all_figures() -> dict[str, dict[str, dict[str, float]]]:
    """By kernel and architecture."""
    return {name: {f"sm_{arch}": asdict(figures_of(name, arch)) for arch in GPUS} for name in WORKS}
